"""The Hydra configuration, shipped as package data (`pkg://workbench.conf`)."""
