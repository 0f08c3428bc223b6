"""Encoders of images, one file for each kind, and load_encoder."""
