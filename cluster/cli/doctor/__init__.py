"""`quire doctor`: facts about this machine, and what they mean for serving."""
