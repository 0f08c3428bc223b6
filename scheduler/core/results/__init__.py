"""The effect of a step's result on the state, and on the measurements that planning uses."""
