"""What operators ask of a gateway: status, engine control, faults and fleet events."""
