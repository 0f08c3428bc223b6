"""Outputs of a form: JSON of a schema, a choice, a grammar. `python examples/structured_outputs.py [MODEL]`."""

from __future__ import annotations

import json
import sys

from quire import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "ship": {"type": "string", "maxLength": 16},
        "sailors": {"type": "integer", "minimum": 1, "maximum": 99},
        "ports": {"type": "array", "items": {"enum": ["Nantucket", "Lima", "Cadiz"]}, "maxItems": 3},
    },
    "required": ["ship", "sailors", "ports"],
    "additionalProperties": False,
}
MOVES = """
root ::= move (" " move)*
move ::= [a-h] [1-8] "-" [a-h] [1-8]
"""


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    forms = {
        "schema": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        "choice": StructuredOutputsParams(choice=["calm", "stormy"]),
        "grammar": StructuredOutputsParams(grammar=MOVES),
    }
    with LLM(model, num_kv_blocks=256) as llm:
        for name, form in forms.items():
            params = SamplingParams(max_tokens=100, temperature=0.8, seed=2, structured_outputs=form)
            (output,) = llm.generate("The sea was", params)
            completion = output.outputs[0]
            print(f"{name}: {completion.text} ({completion.finish_reason})")
            if name == "schema" and completion.finish_reason == "stop":
                print(f"  {len(json.loads(completion.text)['ports'])} ports")


if __name__ == "__main__":
    main()
