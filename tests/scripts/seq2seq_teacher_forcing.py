"""Reversing sequences with an encoder and a decoder, fed with the targets (teacher forcing)."""

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

SOS, EOS, VOCAB, LENGTH, HIDDEN = 0, 1, 12, 4, 32
torch.manual_seed(11)


class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.embedding = nn.Embedding(input_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)

    def forward(self, input):
        return self.gru(self.embedding(input))


class DecoderRNN(nn.Module):
    def __init__(self, hidden_size, output_size):
        super().__init__()
        self.embedding = nn.Embedding(output_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, output_size)

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        batch_size = encoder_outputs.size(0)
        decoder_input = torch.empty(batch_size, 1, dtype=torch.long).fill_(SOS)
        decoder_hidden = encoder_hidden
        outputs = []
        for i in range(LENGTH):
            step, decoder_hidden = self.forward_step(decoder_input, decoder_hidden)
            outputs.append(step)
            decoder_input = target_tensor[:, i].unsqueeze(1)  # teacher forcing
        return torch.cat(outputs, dim=1).log_softmax(-1), decoder_hidden

    def forward_step(self, input, hidden):
        output, hidden = self.gru(torch.relu(self.embedding(input)), hidden)
        return self.out(output), hidden


def get_dataloader(batch_size):
    source = torch.randint(2, VOCAB, (160, LENGTH - 1))
    ends = torch.full((160, 1), EOS)
    return DataLoader(
        TensorDataset(torch.cat([source, ends], 1), torch.cat([source.flip(1), ends], 1)),
        batch_size=batch_size,
        shuffle=True,
    )


def train_epoch(dataloader, encoder, decoder, optimizer, criterion):
    total_loss = 0
    for data in dataloader:
        input_tensor, target_tensor = data
        optimizer.zero_grad()
        encoder_outputs, encoder_hidden = encoder(input_tensor)
        decoder_outputs, _ = decoder(encoder_outputs, encoder_hidden, target_tensor)
        loss = criterion(decoder_outputs.view(-1, decoder_outputs.size(-1)), target_tensor.view(-1))
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    return total_loss / len(dataloader)


train_dataloader = get_dataloader(16)
encoder = EncoderRNN(VOCAB, HIDDEN)
decoder = DecoderRNN(HIDDEN, VOCAB)
optimizer = optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.003)
criterion = nn.NLLLoss()
for epoch in range(1, 4):
    print(epoch, train_epoch(train_dataloader, encoder, decoder, optimizer, criterion))
