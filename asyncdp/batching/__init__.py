"""What trainers do with batches: padding, named columns, splitting over data-parallel ranks."""
