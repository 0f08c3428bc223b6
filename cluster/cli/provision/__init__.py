"""Provisioning of clusters: files for `ray up` and Kubernetes, their checks, and Ray's commands up and down."""
