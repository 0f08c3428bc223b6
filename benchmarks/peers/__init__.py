"""Other engines, measured beside quire: each in a process and an environment of its own.

`install` makes the environments; `process` drives an engine from outside. The modules named after engines run inside:
they import nothing but their engine and `engine`, which lies beside them.
"""
