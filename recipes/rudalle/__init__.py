"""The ruDALL-E Malevich architecture on emoji, in plain PyTorch."""
