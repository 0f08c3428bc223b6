"""The scheduler as a process: its Ray actor, step loop, mailbox and worker group interface."""
