"""Starting a cluster on machines: files for `ray up` and Kubernetes, their checks, and the commands up and down."""
