"""PROVE IT: sends the policy's weights to its engines, and proves that they arrived."""
