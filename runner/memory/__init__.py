"""Activation-checkpoint and offload policies: ``solve`` plans them without torch, ``apply`` installs them."""
