"""KV that travels: a rank serves leased blocks to ranks of other replicas, and reads theirs."""
