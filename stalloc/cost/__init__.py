"""What an operation takes on a GPU that is not there: always an estimate, and called so."""
