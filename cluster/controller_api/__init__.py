"""Messages between the fleet controller and gateways: fleet state and demand."""
