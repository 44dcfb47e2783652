"""PROVE IT: the policy's weights to its engines, and the proof that they arrived."""
