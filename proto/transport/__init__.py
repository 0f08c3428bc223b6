"""Sockets that carry plans and messages: a step channel, ZeroMQ endpoints and their encryption."""
