"""Where plans come from: the argument, the model, Hugging Face, torch's styles, or the layers' own names and shapes."""
