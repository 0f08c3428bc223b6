"""Program that matches patterns with the names of layers; `named_layers` runs it with limits.

Reads JSON from stdin: a list of patterns, and for each layer the list of its names. Writes one line per pattern: a
list of the layers that it is the first to match, by index, or the reason why it is invalid, as a string.
"""

import fnmatch
import json
import re
import resource
import sys


def main() -> None:
    """Match; the arguments are limits: processor time in seconds, and memory in bytes."""
    max_cpu_s, max_bytes = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (max_cpu_s, max_cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    patterns, layers = json.load(sys.stdin)
    left = dict(enumerate(layers))
    for pattern in patterns:
        try:
            matches = [re.compile(expression).match for expression in expressions(pattern)]
        except (re.error, ArithmeticError, RecursionError, ValueError) as error:
            print(json.dumps(str(error)), flush=True)
            return
        found = [
            index for index, names in left.items() if any(match(name) for match in matches for name in names)
        ]
        for index in found:
            del left[index]
        print(found, flush=True)


def expressions(pattern: str) -> list[str]:
    """Return the regular expressions of a pattern: one after ``re:``, or of a name with ``*`` and of its parts."""
    if pattern.startswith("re:"):
        return [pattern[len("re:") :]]
    return [fnmatch.translate(pattern), fnmatch.translate(f"{pattern}.*")]


if __name__ == "__main__":
    main()
