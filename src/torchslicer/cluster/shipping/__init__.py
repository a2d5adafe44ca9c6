"""Ship one stage's part of a cut model as plain data and tensors: no pickle, no constructors, no generated code."""
