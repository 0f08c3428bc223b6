"""Other engines, measured beside quire: each in processes and an environment of its own.

`install` makes the environments; `process` drives an engine from outside, `keeper` ends it whatever happens, and
`comparison` has several take turns. The modules named after engines run inside: they import nothing but their engine
and `engine`, which lies beside them.
"""
