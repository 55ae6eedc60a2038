"""What the tests stand on: worker ranks from a zygote, the dense reference, models, batches, the table of cases."""
