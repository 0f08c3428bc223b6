"""Images of prompts: where they come from, and the tensors and placeholder tokens that they become."""
