"""ResNet-50 as a public memory timeline of PyTorch's profiler shows it: batches of 32, SGD, five steps.

python resnet50_batch.py: writes resnet50_batch.pickle. What its order of requests tells of the program: the inputs stay
on the GPU, the targets are probabilities, and gradients are given up between the forward and the backward pass.
"""

import torch
from torchvision import models

STEPS = 5

model = models.resnet50().cuda()
inputs = torch.randn(32, 3, 224, 224, device="cuda")
labels = torch.rand_like(model(inputs))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
loss_function = torch.nn.CrossEntropyLoss()
for step in range(STEPS + 3):
    if step == 3:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    loss = loss_function(model(inputs), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
torch.cuda.memory._dump_snapshot("resnet50_batch.pickle")
