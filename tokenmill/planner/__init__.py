"""What a model takes and gives on a device, known beforehand: memory, speed, capacity, price. No torch."""
