"""Traces of requests in OpenTelemetry's form."""
