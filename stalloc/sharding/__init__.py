"""Many ranks: what dividing a program over them costs and saves, foreseen and measured."""
