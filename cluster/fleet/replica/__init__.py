"""A replica: launch, record, actor handles, channel group, client, placement and canary."""
