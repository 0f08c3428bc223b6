"""Other inference engines, measured in the same run as quire, each in its own environment and processes.

`install` creates the environments, `process` drives an engine from outside, `supervisor` kills its processes in any
case, and `comparison` lets several engines take turns. The modules named after engines run in those environments:
they import only their engine and `engine`, which is in the same folder.
"""
