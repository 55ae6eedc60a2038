"""What members say to each other: the store they meet at, process groups, and the exchange of tensors."""
