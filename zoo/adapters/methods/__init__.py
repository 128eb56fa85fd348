"""Adapter methods: LoRA, DoRA, VeRA, IA3, LoHa, LoKr, OFT, AdaLoRA and parameters trained in full."""
