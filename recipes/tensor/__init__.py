"""Layers that ranks divide: bytes beside the published formulas, and processor time beside torch's DTensor."""
