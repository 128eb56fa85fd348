"""Adapter methods: LoRA, DoRA, VeRA, IA3, LoHa, LoKr, OFT, AdaLoRA, modules to save."""
