"""What large batches cost, and which rules for the learning rate make up for it."""
