"""Short, slow, exact: plain torch in float64. The truth every other back-end is judged by."""
