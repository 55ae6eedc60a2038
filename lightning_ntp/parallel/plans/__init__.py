"""Plans that others wrote, in our words: Hugging Face's own plans, torch's parallel styles."""
