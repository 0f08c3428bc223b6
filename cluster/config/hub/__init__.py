"""Models of the Hugging Face Hub: ids, downloads into the local cache, and pinned revisions."""
