"""gRPC server of a gateway."""
