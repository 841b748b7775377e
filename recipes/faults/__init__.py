"""The fault campaign: runs that are broken in every way that we know, resumed, and compared with an unbroken run."""
