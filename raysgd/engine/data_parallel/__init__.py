"""How data-parallel ranks hold a model: DDP, and the stages of ZeRO."""
