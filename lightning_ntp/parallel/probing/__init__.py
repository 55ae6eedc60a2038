"""The start-up check that a model's own code follows the slot at every degree: its blocks run on the meta device."""
