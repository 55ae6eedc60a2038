"""The small GPT of the example: model, text, settings, training module, report."""
