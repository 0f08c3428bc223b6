"""The gateway process: gRPC services, routing and migration of requests between replicas."""
