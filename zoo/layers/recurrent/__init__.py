"""Recurrent token mixers: one file per paper, and the pieces they share."""
