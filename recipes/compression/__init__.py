"""What compressors of gradients send, and what they cost in loss."""
