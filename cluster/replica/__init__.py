"""A replica: its launch, record, actors, channel group and client."""
