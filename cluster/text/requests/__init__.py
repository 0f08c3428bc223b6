"""Requests and their outputs as text: chat templates, tokenizer, detokenizer, output types."""
