"""HOLD IT: from the explorer's experiences to the trainer's optimizer batches."""
