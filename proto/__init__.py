"""Messages that cross process borders, configuration and errors. No torch, no Ray."""
