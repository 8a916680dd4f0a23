"""Train on texts and their tags with scikit-learn, and predict the five best tags of a new text."""

import random

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline

from torchlml_lab import TopKClassifier

random.seed(0)
words = {  # replace these with your own texts and tags
    "baking": "flour oven yeast dough crust butter",
    "garden": "soil seeds compost rain pots roots",
    "hiking": "boots trail summit map ridge hut",
    "cycling": "pedal chain helmet gears tire brake",
    "music": "chord piano tempo melody strings choir",
    "chess": "knight pawn opening endgame castle mate",
    "sailing": "mast wind harbor sail anchor tide",
    "astronomy": "comet planet lens orbit eclipse dome",
    "painting": "canvas brush oil palette varnish easel",
    "weather": "cloud storm frost rain wind fog",
}
texts, tags = [], []
for _ in range(1200):
    tags.append(random.sample(sorted(words), random.randint(1, 4)))
    drawn = [word for tag in tags[-1] for word in random.sample(words[tag].split(), 3)]
    texts.append("we had a day with " + ", ".join(random.sample(drawn, len(drawn))))

model = make_pipeline(TfidfVectorizer(), TopKClassifier(random_state=0))
model.fit(texts[:1000], tags[:1000])
print(f"recall on new texts: {model.score(texts[1000:], tags[1000:]):.0%} of their tags")
new = ["From the hut we saw a comet; a storm tore the sail, but the choir sang of the summit and the tide."]
print("the five best tags:", ", ".join(sorted(model.predict(new, k=5)[0])))
