"""Ray as quire uses it: a private local cluster, launch targets and error translation."""
