"""Recurrent token mixers: one file per paper, and their shared parts."""
