"""Dialogues for the shipped model, all made by the grammars and word lists below. No text from anywhere else.

A *thread* is a list of turns [(user, assistant), ...] that belong together: facts and the questions about them, a story, small
talk. A *chat* weaves a few threads into each other (each keeps its own order), so that a fact and its question end up turns apart.
In an assistant text the words between « and » are the answer: what the reader came for, weighted more in training, scored in
evaluation. One entry in eight of every word list is held out: training never uses it as a value of its own list (a name as a name, a
city as a city; it does turn up as a value of other lists, so that its token can be copied at all), evaluation uses nothing else.

    python data_gen.py [N]      prints N chats to look at
"""
import random, re, sys

# ---------------------------------------------------------------------------------------------------------- word lists
NAMES = """Anna Tom Sara Ben Lena Max Mia Paul Nina Oscar Ella Leo Rosa Hugo Clara Felix Emma Jack Lucy Sam Maria Peter Julia Adam
Alice Bob Carol David Eva Frank Grace Henry Iris John Kate Liam Martha Noah Olga Pedro Rita Simon Tina Victor Wendy Yara Zoe Ali
Bella Carlos Diana Erik Fatima George Hannah Ivan Jana Karl Laura Marco Nora Omar Petra Robert Sofia Tim Ursula Vera Will Amir
Bruno Chloe Daniel Elena Fred Gina Harry Ida James Kim Linda Mark Nick Olivia Philip Ruth Stefan Thomas Viola Walter Alex Anton
Beth Chris Dora Emil Fiona Gustav Helen Igor Joe Kevin Lisa Michael Natalie Otto Paula Ralph Sandra Toby Uma Vincent Xenia Yusuf
Aisha Boris Celia Dennis Edith Flora Gregor Hilda Ines Jonas Klara Lars Mona Nadia Oliver Priya Quinn Rosie Sven Tara Steve Mary
Susan Kenji Yuki Chen Wei Ravi Anita Hassan Leila Diego Lucia Pablo Andrea Ahmed Sophie Charlie Jane Matt Dan Amy Lily Jim""".split()
CITIES = """Rome Paris London Berlin Oslo Madrid Vienna Prague Lisbon Dublin Athens Cairo Tokyo Delhi Boston Chicago Lima Quito Helsinki
Warsaw Budapest Munich Hamburg Milan Venice Naples Lyon Geneva Zurich Bern Basel Brussels Amsterdam Copenhagen Stockholm Moscow Kyiv
Istanbul Dubai Mumbai Seoul Beijing Shanghai Sydney Toronto Denver Dallas Seattle Austin Miami Havana Bogota Santiago Nairobi Lagos
Tunis Porto Seville Barcelona Florence Turin Cologne Leipzig Dresden Krakow Riga Tallinn Vilnius Sofia Bristol Leeds Oxford York
Glasgow Cork Kyoto Osaka Hanoi Manila Perth Montreal""".split()
COLOURS = "red blue green yellow black white orange purple pink brown grey silver golden violet turquoise crimson".split()
ANIMALS = """fox owl bear wolf mouse cat dog rabbit horse cow sheep goat duck goose hen frog turtle snail bee ant lion tiger elephant
monkey giraffe zebra penguin whale dolphin shark fish crow eagle swan hedgehog squirrel deer otter beaver badger mole spider butterfly
dragon unicorn camel panda koala kangaroo parrot pig donkey crab bat lizard""".split()
FOODS = """pizza pasta soup bread cheese rice salad cake chocolate apples bananas cherries grapes pears plums oranges lemons
strawberries carrots potatoes tomatoes onions beans eggs butter honey noodles pancakes sushi tacos mushrooms fish chicken cookies
nuts corn peas yogurt melons peaches""".split()
DRINKS = "tea coffee water milk juice lemonade cocoa wine beer cider".split()
HOBBIES = """chess football tennis swimming running dancing singing painting drawing cooking baking reading fishing sailing hiking
cycling gardening knitting skiing climbing photography hockey basketball golf yoga surfing""".split()
JOBS = """teacher doctor nurse baker farmer painter singer writer driver pilot cook carpenter plumber gardener lawyer student engineer
dentist tailor sailor waiter butcher librarian actor dancer scientist programmer judge postman mechanic""".split()
THINGS = """box bag door key book chest drawer car boat tent lamp chair table bottle cup coat hat shoe ring clock phone letter map coin
bell basket jar safe locker suitcase bike kite drum ball pen knife rope mirror camera wallet""".split()
ROOMS = """kitchen garden cellar attic garage bedroom bathroom hall office library barn shed tower cave""".split()
SPOTS = """kitchen garden cellar attic garage bedroom bathroom hall office library drawer basket cupboard car bag box fridge oven
closet barn shed tower pocket chest""".split()
ADJS = """old new small big red blue green quiet long short dark bright cold warm soft heavy round strange pretty clean dusty wooden
broken empty narrow wide tall deep slow quick gentle busy lazy happy tired clever""".split()
NOUNS = """house garden river road tree bridge hill field market street window wall table room village forest lake mountain boat train
station school church shop park cloud wind rain sun moon star stone leaf flower bird farm mill gate path fence""".split()
INSTRUMENTS = "piano guitar violin flute drums trumpet harp cello".split()
COUNTRIES = """Italy France England Germany Norway Spain Austria Portugal Ireland Greece Egypt Japan India Peru Finland Poland Hungary
Denmark Sweden Russia Turkey China Korea Cuba Canada Brazil Mexico Kenya Chile Belgium""".split()
CAPITALS = dict(zip(COUNTRIES, """Rome Paris London Berlin Oslo Madrid Vienna Lisbon Dublin Athens Cairo Tokyo Delhi Lima Helsinki Warsaw
Budapest Copenhagen Stockholm Moscow Ankara Beijing Seoul Havana Ottawa Brasilia Mexico-City Nairobi Santiago Brussels""".split()))
OPPOSITES = """hot cold, big small, old young, tall short, happy sad, fast slow, day night, up down, left right, open closed, light dark,
rich poor, hard soft, early late, good bad, new old, full empty, loud quiet, clean dirty, wet dry, strong weak, long short""".replace("\n", " ")
OPPOSITES = [p.split() for p in OPPOSITES.split(",")]
SOUNDS = """dog barks, cat meows, cow moos, duck quacks, bee buzzes, lion roars, sheep bleats, horse neighs, pig grunts, wolf howls,
frog croaks, owl hoots, mouse squeaks, crow caws, snake hisses, hen clucks""".replace("\n", " ")
SOUNDS = [p.split() for p in SOUNDS.split(",")]
HUES = """sky blue, grass green, snow white, blood red, night black, sun yellow, lemon yellow, cherry red, coal black, milk white,
frog green, carrot orange, sea blue, banana yellow, tomato red""".replace("\n", " ")
HUES = [p.split() for p in HUES.split(",")]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
RELATIONS = "brother sister mother father friend uncle aunt cousin neighbour boss teacher son daughter wife husband".split()
PETS = "dog cat horse parrot rabbit hamster turtle goat".split()
SYLLABLES = "ba be bo da do fi ga go ka ki ko la le li lo ma mi mo na ne ni no pa pi ra ri ro sa se si so ta te ti to va ve vi vo za zo bra dre kli sto tru".split()
MATERIALS = "wooden iron golden silver glass paper stone plastic".split()

LISTS = [NAMES, CITIES, FOODS, ANIMALS, HOBBIES, JOBS, THINGS, COUNTRIES, COLOURS, NOUNS, ADJS, ROOMS + SPOTS]

def an(word):
    return ("an " if word[0] in "aeiou" else "a ") + word

def join(words, last="and"):
    """a, b and c"""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" {last} " + words[-1]

class World:
    """Draws words for one chat. `held`: only held-out entries as values; `apart`: a text's questions never stand in its own message. A person's name is never drawn twice."""
    def __init__(self, r, held=False, apart=False):
        self.r, self.held, self.apart, self.used = r, held, apart, set()
        self.low = r.random() < 0.22                                       # this visitor types without capitals
        self.bare = r.random() < 0.3                                       # ... and without full stops
    def pick(self, words):
        if len(words) < 14: return self.r.choice(words)                    # short lists are not split
        if not self.held and self.r.random() < 0.3:                        # any word can be a value, those held out elsewhere first of all: copy what is there
            other, rare = self.r.choice(LISTS), self.r.random() < 0.5
            own = words[5::8]
            words = [x for i, x in enumerate(other) if x not in own and (i % 8 == 5 or not rare)]
            if words: return self.r.choice(words)
            words = other
        return self.r.choice([x for i, x in enumerate(words) if (i % 8 == 5) == self.held])
    def fresh(self, draw):
        for _ in range(50):
            x = draw()
            if x.lower() not in self.used: break
        self.used.add(x.lower())
        return x
    def name(self):
        def draw():
            x = self.r.random()
            if x < 0.06: return "".join(self.r.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(self.r.randrange(3, 8))).capitalize()
            if x < 0.3: return "".join(self.r.choice(SYLLABLES) for _ in range(self.r.choice((2, 2, 3)))).capitalize()
            return self.pick(NAMES)
        return self.fresh(draw)
    def code(self):
        """A number of 2 to 6 digits; held out: those whose digits sum to a multiple of 8."""
        while True:
            n = self.r.choice((2, 3, 3, 4, 4, 4, 4, 5, 6))
            s = str(self.r.randrange(10 ** (n - 1), 10 ** n))
            if (sum(map(int, s)) % 8 == 0) == self.held: return s
    def word(self):
        """A password: a made-up word."""
        return "".join(self.r.choice(SYLLABLES) for _ in range(self.r.choice((2, 3))))
    def thing(self):
        """'red box', 'old key': something that a chat mentions once."""
        return self.fresh(lambda: self.r.choice(self.r.choice((COLOURS, COLOURS, MATERIALS))) + " " + self.r.choice(THINGS))
    def near(self, thing):
        """A near miss: another thing of this colour, or this thing in another colour."""
        colour, what = thing.split()
        return self.fresh(lambda: colour + " " + self.r.choice(THINGS) if self.r.random() < 0.5 else self.r.choice(COLOURS) + " " + what)
    def say(self, text):
        """What this visitor types for `text`: the visitor's habits of case and punctuation."""
        r = self.r
        if self.bare or r.random() < 0.08: text = re.sub(r"[.?!]$", "", text)
        elif r.random() < 0.04: text += r.choice(("!", "!!", " :)", "..", "?"))
        return text.lower() if self.low else text

def answers(values):
    """The values of an answer: between commas alone, so that no word in it depends on how many are still to come."""
    return ", ".join("«" + v + "»" for v in values)

def c(r, options):
    return r.choice(options.split("|") if isinstance(options, str) else options)

# -------------------------------------------------------------------------------------------------------------- filler
def sentence(r):
    """One sentence that says nothing anyone will ask about."""
    a, b, n, m = r.choice(ADJS), r.choice(ADJS), r.choice(NOUNS), r.choice(NOUNS)
    day, name = r.choice(DAYS), r.choice(ANIMALS)
    return r.choice((
        f"The {n} was {a} and {b}.", f"There is a {n} near the {m}.", f"A {a} {n} stood behind the {m}.",
        f"On {day} the {n} looked {a}.", f"The {name} walked along the {a} {n}.", f"We saw a {a} {name} by the {n}.",
        f"The {n} is {a} in the morning.", f"People say that the {n} was once {a}.", f"It rained on the {n} all day.",
        f"The wind moved the {n} and the {m}.", f"Nobody knew why the {n} was so {a}.", f"A {name} slept under the {m}.",
        f"The {a} {n} leads to the {b} {m}.", f"Every {day} the {m} is {b}.", f"The sun shone on the {n}.",
        f"It was a {a} day in the {m}.", f"They painted the {n} and cleaned the {m}.", f"The {m} was full of people.",
        f"From the {n} you can see the {m}.", f"Some like the {n}, others like the {m}."))

def filler(r, tokens):
    """About `tokens` tokens of filler sentences, as a list."""
    return [sentence(r) for _ in range(max(1, tokens // 10))] if tokens > 0 else []

def document(r, keys, tokens, sep=" "):
    """The sentences `keys` in filler, in the order given, anywhere."""
    lines = filler(r, tokens)
    places = sorted(r.randrange(len(lines) + 1) for _ in keys)
    for at, key in reversed(list(zip(places, keys))): lines.insert(at, key)
    return sep.join(lines)

def scatter(w, keys, tokens):
    """The sentences `keys` over two to four messages of filler to read; each keeps its order in its message."""
    r, n = w.r, w.r.choice((2, 3, 4))
    parts = [[] for _ in range(n)]
    for k in keys: r.choice(parts).append(k)
    return [(w.say(document(r, p, tokens // n)), c(r, PLAIN + "|I have read it.")) for p in parts if p or tokens >= 30]

# ---------------------------------------------------------------------------------------------------------- small talk
TALK = [  # (what one may say, what may be replied); '/' between options
    ("hello/hi/hey/hi there/hello there/hey there/good day/greetings/hello!/hi!/hello friend/yo/hello again/hallo",
     "Hello! How can I help you?/Hi! What would you like to talk about?/Hello! Nice to see you./Hi there! How are you?"),
    ("good morning/morning", "Good morning! Did you sleep well?/Good morning! What can I do for you?"),
    ("good evening/good afternoon", "Good evening! How was your day?/Hello! How was your day?"),
    ("good night/I am going to bed/sleep well/I go to sleep now", "Good night! Sleep well./Good night! See you tomorrow."),
    ("bye/goodbye/see you/see you later/I have to go/bye bye/talk to you later/see you tomorrow",
     "Goodbye! It was nice talking to you./Bye! See you soon./See you later! Take care."),
    ("how are you?/how are you/how are you doing?/how do you do?/are you well?/how is it going?/how are you today?/what's up?",
     "I am fine, thank you. And you?/I am doing well. How are you?/Very well, thank you!"),
    ("I am fine/I am good/I'm fine, thanks/fine/good, thank you/very well/I am well/not bad/I'm okay/great",
     "I am glad to hear that./That is good to hear./Wonderful!"),
    ("thank you/thanks/thank you very much/thanks a lot/many thanks/thx/thank you!/cheers",
     "You are welcome!/You're welcome. Anything else?/No problem!"),
    ("ok/okay/alright/I see/all right/fine by me/sure/right", "Is there anything else you would like to know?/Good. What next?/All right!"),
    ("yes/yes please/yeah/yep/of course", "Good! Tell me more./All right!/Great!"),
    ("no/nope/no thanks/no, thank you/not really", "All right. Let me know if you need something./Okay, no problem."),
    ("who are you?/what are you?/tell me about yourself/what is this?/who am I talking to?/introduce yourself",
     "I am a very small language model that lives in kvcomp./I am kvcomp's little model. I can chat, tell stories and remember what you tell me."),
    ("what is your name?/what's your name?/do you have a name?/what should I call you?/your name?",
     "You can call me Tiny. I am a small model./My name is Tiny."),
    ("what can you do?/help/help me/can you help me?/what do you do?/how can you help me?/I need help/what can I ask you?",
     "I can chat, tell stories, and remember what you tell me. Tell me your name, and ask me later!/I can tell you a story, or remember facts. Try me!"),
    ("are you a robot?/are you human?/are you real?/are you a person?/are you a computer?/are you alive?/are you an AI?",
     "I am a small computer program, not a person./No, I am not a person. I am a small language model."),
    ("how old are you?/what is your age?/when were you born?/when were you made?", "I am very young. I was trained in one evening./I am only a few hours of training old."),
    ("where do you live?/where are you?/where are you from?", "I live in your computer's memory./I live in a small file on your computer."),
    ("are you smart?/are you clever?/do you know everything?/how smart are you?", "I am very small, so I do not know much. But I remember what you tell me."),
    ("how is the weather?/is it raining?/what is the weather like?/nice weather today/will it rain?/what's the weather?",
     "I cannot look outside, so I do not know the weather./I cannot see the weather from in here. Is it nice?"),
    ("what time is it?/what day is it?/what is the date today?/what day is today?", "I have no clock, so I do not know./I am sorry, I cannot see a clock."),
    ("I am tired/I'm sleepy/I am so tired today/I had a long day", "Then you should rest a little./Maybe a short nap will help."),
    ("I am happy/I'm so happy/I had a great day/today was a good day/I am in a good mood", "That is wonderful! What made you happy?/How nice! I am happy for you."),
    ("I am sad/I feel bad/I'm not well/I had a bad day/I feel lonely/I am not happy", "I am sorry to hear that. Do you want to talk about it?/I am sorry. I hope tomorrow is better."),
    ("I am bored/I'm bored/what should I do?/I have nothing to do/entertain me", "Shall I tell you a story?/You could read a book, or ask me for a story."),
    ("I am hungry/I'm hungry/what should I eat?/what is for dinner?", "How about a warm soup and some bread?/Maybe you should eat an apple."),
    ("I am thirsty/what should I drink?", "How about a cup of tea?/A glass of water will help."),
    ("I am cold/it is cold here/it is snowing", "Put on a warm coat and drink some tea."),
    ("it is hot today/I am hot/it is so hot", "Drink a lot of water and stay in the shade."),
    ("I am angry/I am mad/this makes me angry", "Take a deep breath. What happened?"),
    ("I am sick/I have a cold/my head hurts/I feel sick", "I am sorry. I hope you get well soon./Get well soon! Drink some tea and rest."),
    ("do you like music?/do you sing?/can you sing?/sing a song/sing me a song", "I cannot sing well, but here I go: la la la!/I like music, but I can only write."),
    ("do you like cats?/do you like dogs?/do you like animals?/do you have a pet?", "I like all animals, but I have never met one./Animals are lovely. Do you have a pet?"),
    ("do you like pizza?/what do you eat?/do you eat?/are you hungry?", "I do not eat. I only read and write./I never eat, but I hear that soup is good."),
    ("what do you like?/what is your favourite colour?/what do you love?/do you have hobbies?/what is your hobby?", "I like short words and long stories./I like stories about animals."),
    ("I like you/you are nice/you are great/you are cool/I love you/you are funny/good bot/well done/good job/very good",
     "Thank you! That is very kind./Thank you! I like talking to you, too."),
    ("you are stupid/you are wrong/that is wrong/you are bad/I don't like you/that is not right/wrong/no, that is wrong",
     "I am sorry. I am only a small model./I am sorry about that. I will try to do better."),
    ("tell me a joke/do you know a joke?/make me laugh/say something funny/a joke please/another joke/joke",
     "Why did the snail cross the road? Nobody knows, it is still on its way./What is brown and sticky? A stick./Why do bees hum? They forgot the words."
     "/What did the big clock say to the small clock? Your hands are too small./Why was the book sad? It had too many problems on one page."),
    ("tell me something interesting/tell me a fact/do you know a fun fact?/tell me something/surprise me/teach me something",
     "An owl can turn its head almost all the way around./A snail can sleep for a very long time./Bees dance to tell other bees where the flowers are./A group of crows can remember a face."),
    ("write a poem/tell me a poem/can you write a poem?/a poem please/make a poem/recite a poem",
     "The moon is round, the night is deep, the little fox has gone to sleep./A drop of rain fell on a stone, and then the stone was not alone./The sun came up, the birds began, and off into the field I ran."),
    ("sorry/I am sorry/my mistake/oops", "No problem at all!/That is all right."),
    ("lol/haha/ha ha/that is funny/hahaha/very funny", "I am glad you like it!/Laughing is healthy!"),
    ("wow/amazing/cool/nice/that is great/that is nice/awesome/interesting", "I am glad you like it!/Yes, it is!"),
    ("really?/are you sure?/is that true?/seriously?", "I think so, but I am a small model and can be wrong./I believe so."),
    ("why?/why is that?/how come?/how so?", "That is a good question. I do not know./I am not sure why."),
    ("I don't understand/what do you mean?/what?/huh?/pardon?/I do not get it", "I am sorry. Could you say it in other words?/Let us try again. What would you like to know?"),
    ("what is the meaning of life?/why are we here?/what is love?/is there a god?", "That is a big question for a small model./I do not know, but friends and stories help."),
    ("let us play a game/can we play?/do you want to play?/let's play", "Tell me three facts, and ask me about them later!/Let us play a memory game: tell me a secret number and ask me later."),
    ("I am at work/I am working/I have to work", "Then I will keep it short. Good luck with your work!/Do not work too hard!"),
    ("I am back/I'm back/here I am again", "Welcome back!/Welcome back! What shall we do?"),
    ("test/testing/this is a test/is this working?/are you there?/can you hear me?/hello?", "Yes, I am here./I am here. It works!"),
    ("can you remember things?/do you have a memory?/will you remember me?/do you remember things?", "Yes, I remember what you tell me in this chat./I remember everything you say until this chat ends."),
    ("what is a KV cache?/what is kvcomp?/how do you work?/how does it work?/what is a language model?",
     "I read your words one by one and keep notes about them in a cache./I keep a key and a value for each word that I read. That is my memory."),
    ("do you speak German?/do you speak French?/can you speak Spanish?/which languages do you speak?", "I only know a little English."),
    ("can you do math?/can you count?/are you good at maths?", "Only a little: I can add small numbers./I can count a little: one, two, three, four, five."),
    ("nothing/never mind/forget it/it is nothing/nothing much", "All right!/Okay. I am here if you need me."),
    ("I don't know/no idea/I am not sure/maybe/hmm", "That is fine. Take your time./No hurry."),
    ("continue/go on/tell me more/more/and then?/what else?", "I do not know more about that. Ask me something else!/That is all I know."),
    ("happy birthday/merry christmas/happy new year/congratulations", "Thank you very much! The same to you."),
    ("please/please help/can I ask you something?/I have a question/may I ask you something?", "Of course! What is it?/Sure, ask me anything."),
]
TALK = [(u.split("/"), a.split("/")) for u, a in TALK]
TALK[0][1].append("Hello!")
UNKNOWN = ["I am sorry, I do not know that. I am a very small model.", "I do not know that. I only know what you tell me."]
OPEN = """who is the president of {N}/how far is it to {N}/who wrote {N}/how do I fix my {T}/what is the price of a {T}/how do I cook {F}/explain {F} to me
what do you think about {N}/who won the {T} game/how tall is the {M}/when was {N} built/how many {A}s are in {N}/what is {F} made of/how does a {T} work
write a letter to {N}/translate {T}/who invented the {T}/why is the {M} {J}/can you buy me a {T}/how do I get to {N}/what happened in {N}
write code for a {T}/how heavy is {A2}/do you know {N}/is {N} bigger than {N2}/should I buy a {T}/how old is the {M}""".replace("\n", "/").split("/")

def open_question(w):
    """A question about the wide world: the honest reply is that a model this small does not know."""
    r = w.r
    text = r.choice(OPEN).format(N=r.choice(CITIES + NAMES), N2=r.choice(CITIES), T=r.choice(THINGS), F=r.choice(FOODS), M=r.choice(NOUNS),
                                 A=r.choice(ANIMALS), A2=an(r.choice(ANIMALS)), J=r.choice(ADJS))
    return w.say(text.capitalize() if r.random() < 0.5 and "{N}" not in text else text[0].upper() + text[1:]) + ("?" if r.random() < 0.6 else ""), r.choice(UNKNOWN)

def knowledge(w):
    """One turn of the little that the model knows by heart."""
    r, kind = w.r, w.r.randrange(7)
    if kind == 0:
        land = r.choice(COUNTRIES)
        return c(r, f"What is the capital of {land}?|capital of {land}?|Tell me the capital of {land}."), f"The capital of {land} is «{CAPITALS[land]}»."
    if kind == 1:
        a, b = r.choice(OPPOSITES)
        return c(r, f"What is the opposite of {a}?|opposite of {a}?|What is the contrary of {a}?"), f"The opposite of {a} is «{b}»."
    if kind == 2:
        a, s = r.choice(SOUNDS)
        return c(r, f"What does {an(a)} do?|What sound does {an(a)} make?|How does {an(a)} sound?"), f"{an(a).capitalize()} «{s}»."
    if kind == 3:
        t, h = r.choice(HUES)
        return c(r, f"What colour is {t}?|What is the colour of {t}?|Which color is the {t}?"), f"It is «{h}»."
    if kind == 4:
        a, b = r.randrange(11), r.randrange(11)
        return c(r, f"What is {a} + {b}?|What is {a} plus {b}?|{a} + {b}|how much is {a} + {b}?|{a}+{b}=?"), f"{a} plus {b} is «{a + b}»."
    if kind == 5:
        i = r.randrange(7)
        return f"Which day comes after {DAYS[i]}?", f"After {DAYS[i]} comes «{DAYS[(i + 1) % 7]}»."
    i = r.randrange(12)
    return f"Which month comes after {MONTHS[i]}?", f"After {MONTHS[i]} comes «{MONTHS[(i + 1) % 12]}»."

def talk(w):
    """One turn of small talk."""
    r, x = w.r, w.r.random()
    if x < 0.09: return open_question(w)
    if x < 0.22:
        u, a = knowledge(w)
        return w.say(u), a
    users, replies = TALK[r.choice((0, r.randrange(8), r.randrange(len(TALK)), r.randrange(len(TALK)), r.randrange(len(TALK))))]
    u = r.choice(users)
    if r.random() < 0.6: u = u[0].upper() + u[1:]
    if r.random() < 0.4 and u[-1].isalpha(): u += r.choice("..!")
    return (u.lower() if w.low else u), r.choice(replies)

# ------------------------------------------------------------------------------------------------------------- stories
PLACES = """a green forest/a small village/an old castle/a deep cave/a wide valley/a little house by the sea/a tall tower/a quiet garden/
a dark wood/a big city/a warm barn/an island far away/a hollow tree/a hut on a hill/a snowy mountain/a house by the lake""".replace("\n", "").split("/")
TREASURES = "ring/hat/key/ball/drum/map/golden coin/red scarf/bell/lamp/book/kite/blue stone/silver spoon".split("/")
TRAITS = "little/brave/clever/shy/lazy/kind/curious/young/old/funny/hungry/lonely/tiny/proud/gentle".split("/")
HEROES = ANIMALS + "king queen boy girl robot pirate knight wizard princess farmer sailor ghost giant baker prince witch".split()
LOOKED = "under the bed/behind the door/in the garden/under a stone/near the river/in the tall grass/behind a tree/in the old well/on the roof/by the gate".split("/")

def story(w, hero=None, name=None, place=None):
    """A told story and what may be asked about it: (text, [(question, answer)])."""
    r = w.r
    hero = hero or r.choice(HEROES)
    friend = r.choice([x for x in HEROES if x != hero])
    trait, trait2 = r.sample(TRAITS, 2)
    n = name or w.fresh(lambda: w.pick(NAMES))
    given = place is not None
    place = place or r.choice(PLACES)
    he, his = r.choice((("he", "his"), ("she", "her")))
    if hero in ("king", "boy", "prince", "wizard", "pirate", "knight"): he, his = "he", "his"
    if hero in ("queen", "girl", "princess", "witch"): he, his = "she", "her"
    t = r.choice(TREASURES)
    l1, l2, l3 = r.sample(LOOKED, 3)
    begin = c(r, (f"Once upon a time there was {an(trait)} {hero} named {n}. {n} lived in {place}.",
                  f"There once was {an(trait)} {hero} whose name was {n}. {n} lived in {place}.",
                  f"Long ago, {an(trait)} {hero} named {n} lived in {place}."))
    one = c(r, "One day|One morning|One cold evening|One sunny day|One night")
    middle = c(r, (
        f"{one}, {n} lost {his} {t}. {n} looked {l1} and {l2}, but the {t} was not there. Then {he} met {an(trait2)} {friend}. \"Your {t} is {l3},\" said the {friend}. "
        f"They went there together and found the {t}.",
        f"{one}, {n} found {an(t)} {l1}. \"Whose {t} is this?\" asked {n}. Nobody knew. At last {he} met {an(trait2)} {friend} who was crying. \"I lost my {t},\" said the {friend}. "
        f"{n} gave the {t} back, and the {friend} smiled.",
        f"{one}, a big storm came. The wind blew and the rain fell. {n} heard a cry {l1}. It was {an(trait2)} {friend} who was cold and wet. "
        f"{n} took the {friend} home and made some hot soup. They sat by the fire until the storm was over.",
        f"{one}, {n} was very hungry, but there was nothing to eat. {n} walked and walked until {he} met {an(trait2)} {friend} with a big cake. "
        f"\"May I have some cake?\" asked {n}. \"Yes,\" said the {friend}, \"if you tell me a story.\" So {n} told a story, and they ate the cake together.",
        f"{one}, {n} wanted to see the world. {n} packed {an(t)} and walked over the hills. On the road {he} met {an(trait2)} {friend}. \"Where are you going?\" asked the {friend}. "
        f"\"I do not know,\" said {n}. \"Then I will come with you,\" said the {friend}. They saw the sea, and then they went home.",
        f"{one}, {n} wanted to learn how to sing. But every song went wrong, and the birds laughed. {an(trait2).capitalize()} {friend} heard it. "
        f"\"Sing slowly,\" said the {friend}, \"and sing every day.\" {n} did so, and in the end all the birds came to listen.",
        f"{one}, {n} found an old map {l1}. It showed the way to a treasure. {n} asked {an(trait2)} {friend} for help. They dug {l2} and they dug {l3}. "
        f"At last they found a box with {an(t)} in it. They shared it.",
        f"{one}, {n} could not sleep. {n} was afraid of the dark. {an(trait2).capitalize()} {friend} came by with a small lamp. \"The dark is only a blanket for the sun,\" said the {friend}. "
        f"Then {n} was not afraid any more.",
        f"{one}, {n} and {an(trait2)} {friend} had a race. The {friend} was fast, but then fell into a hole {l1}. {n} stopped and helped the {friend} out. "
        f"They walked to the end together, and both won."))
    end = c(r, (f"From that day on, {n} and the {friend} were best friends.", f"And {n} was happy for a long, long time.", f"{n} never forgot that day. The end.",
                f"And if you go to that place, you can still see {n} and the {friend} there.", f"Then {n} went home and slept well. The end."))
    asks = [(c(r, f"What was the name of the {hero}?|What was the {hero} called?|who was the {hero}?"), f"The {hero} was named «{n}»."),
            (c(r, f"Who was {n}?|What kind of hero was {n}?"), f"You mean {n}, {an(trait).split()[0]} «{trait} {hero}»."),
            (f"Whom did {n} meet?" if friend in middle else f"Who was {n}?", f"In the story, {n} met the «{friend}»." if friend in middle else f"You mean {n}, {an(trait).split()[0]} «{trait} {hero}».")]
    if not given: asks.append((f"Where did {n} live?", f"In the story, {n} lived in «{place}»."))
    return f"{begin} {middle} {end}", asks

def story_thread(w, size=0):
    r = w.r
    hero, name, place = r.choice(HEROES), None, None
    x = r.random()
    if x < 0.12:
        ask, hero = c(r, "Tell me a story.|tell me a story|Can you tell me a story?|A story please.|Do you know a story?|I want to hear a story.|another story|Tell me another story."), None
    else:
        about = an(hero)
        if r.random() < 0.2: about = f"{an(r.choice(TRAITS))} {hero}"
        if r.random() < 0.25: name = w.name(); about += c(r, " named | called ") + name
        ask = c(r, "Tell me a story about {}.|tell me a story about {}|Can you tell me a story about {}?|Please tell me a story about {}.|I want a story about {}.|"
                   "story about {}|Tell a short story about {}.|Do you know a story about {}?|write a story about {}|Tell me about {}.").format(about)
    text, asks = story(w, hero, name, place)
    turns = [(w.say(ask), text)]
    for q, a in r.sample(asks, r.choice((0, 1, 1, 2))): turns.append((w.say(q), a))
    return turns

# ------------------------------------------------------------------------------- facts about the user, asked turns later
# attribute: (draw, what the user says, special replies, what is asked, the answer, "not told" reply)
FACTS = {
 "name": (lambda w: w.name(),
   "My name is {v}.|My name is {v}.|My name is {v}.|I am {v}.|I'm {v}.|Call me {v}.|Hi, I'm {v}.|Hello, my name is {v}.|Hello, I am {v}!|You can call me {v}.|My name's {v}.|Hi! My name is {v}.|People call me {v}.",
   "Nice to meet you, {v}!|Hello {v}!|Hello {v}! How can I help you?|Hi {v}, nice to meet you.",
   "What is my name?|What is my name?|What's my name?|Who am I?|Do you remember my name?|Do you know my name?|Tell me my name.|my name?|What am I called?|Can you tell me my name?|Say my name.",
   "Your name is «{v}».", "You have not told me your name yet."),
 "city": (lambda w: w.pick(CITIES),
   "I live in {v}.|I live in {v}.|I am living in {v}.|My home is in {v}.|My city is {v}.|My home town is {v}.|I'm from {v}.|I come from {v}.|I moved to {v}.|Right now I live in {v}.",
   "{v} must be a nice place.|How is life in {v}?|I have heard of {v}.",
   "Where do I live?|Where do I live?|Which city do I live in?|In which city do I live?|What is my city?|Do you know where I live?|Where is my home?|Where am I from?|What city am I from?|Do you remember where I live?",
   "You live in «{v}».", "You have not told me where you live."),
 "colour": (lambda w: w.pick(COLOURS),
   "My favourite colour is {v}.|My favorite color is {v}.|I like the colour {v} most.|I love the color {v}.|The colour I like best is {v}.",
   "{v} is a nice colour.|I like {v}, too.",
   "What is my favourite colour?|What is my favorite color?|Which colour do I like most?|What's my favourite color?|Do you know my favourite colour?|what colour do I like?",
   "Your favourite colour is «{v}».", "You have not told me your favourite colour."),
 "food": (lambda w: w.pick(FOODS),
   "My favourite food is {v}.|My favorite food is {v}.|I like to eat {v}.|I love {v}.|I eat {v} every day.",
   "I hear that {v} tastes good.|Enjoy your {v}!",
   "What is my favourite food?|What do I like to eat?|What is my favorite food?|Which food do I like?|what food do I love?",
   "You like to eat «{v}».", "You have not told me what you like to eat."),
 "animal": (lambda w: w.pick(ANIMALS),
   "My favourite animal is the {v}.|My favorite animal is the {v}.|The animal I like most is the {v}.",
   "The {v} is a lovely animal.", "What is my favourite animal?|Which animal do I like most?|What's my favorite animal?",
   "Your favourite animal is the «{v}».", "You have not told me your favourite animal."),
 "drink": (lambda w: w.pick(DRINKS), "My favourite drink is {v}.|I like to drink {v}.|I drink {v} every morning.", "A cup of {v} is a good idea.",
   "What is my favourite drink?|What do I like to drink?|What do I drink?", "You like to drink «{v}».", "You have not told me what you like to drink."),
 "hobby": (lambda w: w.pick(HOBBIES), "My hobby is {v}.|I like {v}.|In my free time I enjoy {v}.|I enjoy {v}.", "{v} sounds like fun.|Have fun with {v}!",
   "What is my hobby?|What do I do in my free time?|What do I enjoy?|Do you know my hobby?", "Your hobby is «{v}».", "You have not told me your hobby."),
 "job": (lambda w: w.pick(JOBS), "I work as a {v}.|I am a {v}.|My job is {v}.|I'm a {v}.|I am working as a {v}.", "A {v} has a lot to do.|How is life as a {v}?",
   "What is my job?|What do I do for a living?|What is my profession?|What do I work as?|Do you know my job?", "You work as a «{v}».", "You have not told me your job."),
 "age": (lambda w: str(w.r.randrange(8, 95)), "I am {v} years old.|My age is {v}.|I'm {v} years old.|I am {v}.", "{v} is a good age.",
   "How old am I?|What is my age?|Do you know how old I am?|Do you remember my age?", "You are «{v}» years old.", "You have not told me your age."),
 "code": (lambda w: w.code(), "My code is {v}.|My secret code is {v}.|Remember my code: {v}.|Please remember my code {v}.|My secret number is {v}.|My number is {v}.|Remember the number {v}.",
   "I will remember {v}.|{v}, got it.", "What is my code?|What is my secret code?|What is my number?|What was my code?|Tell me my code.|Which number did I tell you?|What is my secret number?",
   "Your code is «{v}».", "You have not told me your code."),
 "word": (lambda w: w.word(), "My password is {v}.|The password is {v}.|Remember the password {v}.", "I will keep {v} in mind.",
   "What is my password?|What is the password?|What was the password?|Tell me the password.", "The password is «{v}».", "You have not told me your password."),
 "country": (lambda w: w.pick(COUNTRIES), "My country is {v}.|I was born in {v}.|I was born and raised in {v}.", "{v} is a beautiful country.",
   "Where was I born?|What is my country?|Which country was I born in?", "You were born in «{v}».", "You have not told me where you were born."),
 "instrument": (lambda w: w.pick(INSTRUMENTS), "I play the {v}.|My instrument is the {v}.|I am learning to play the {v}.", "I would love to hear your {v}.",
   "Which instrument do I play?|What do I play?|What is my instrument?", "You play the «{v}».", "You have not told me which instrument you play."),
 "month": (lambda w: w.pick(MONTHS), "My birthday is in {v}.|I was born in the month of {v}.", "{v} is a good month.",
   "When is my birthday?|In which month is my birthday?", "Your birthday is in «{v}».", "You have not told me your birthday."),
 "car": (lambda w: w.pick(COLOURS), "My car is {v}.|I drive a {v} car.|I have a {v} car.", "A {v} car looks nice.",
   "What colour is my car?|Which color does my car have?|What colour is my car?", "Your car is «{v}».", "You have not told me the colour of your car."),
}
for _p in PETS:
    FACTS[_p] = (lambda w: w.name(), f"My {_p} is called {{v}}.|I have a {_p} named {{v}}.|My {_p}'s name is {{v}}.|I have a {_p}. Its name is {{v}}.|The name of my {_p} is {{v}}.",
      f"{{v}} is a good name for a {_p}.|Say hello to {{v}}!", f"What is the name of my {_p}?|What is my {_p}'s name?|What is my {_p} called?|How is my {_p} called?",
      f"Your {_p} is called «{{v}}».", f"You have not told me the name of your {_p}.")
for _p in RELATIONS:
    FACTS[_p] = (lambda w: w.name(), f"My {_p} is called {{v}}.|My {_p}'s name is {{v}}.|The name of my {_p} is {{v}}.|My {_p} is named {{v}}.",
      f"Say hello to {{v}}!|{{v}} is a nice name.", f"What is the name of my {_p}?|What is my {_p}'s name?|What is my {_p} called?|Who is my {_p}?",
      f"Your {_p} is called «{{v}}».", f"You have not told me the name of your {_p}.")
COMMON = ["name", "name", "name", "city", "city", "colour", "food", "job", "code", "age", "hobby"]
PLAIN = "Okay.|Got it.|I will remember that.|All right, I will remember that.|Thank you for telling me.|Good to know.|I see.|Understood.|Noted.|That is good to know."
CHANGE = {"name": "Actually, my name is {v}.|From now on call me {v}.|I changed my name to {v}.", "city": "I moved to {v}.|Now I live in {v}.|I do not live there any more, I live in {v} now.",
          "job": "I have a new job: I work as a {v}.|Now I work as a {v}.", "age": "Today is my birthday, I am {v} years old now."}
AGAIN = "Actually, {s}|I changed my mind. {S}|Wait, now {s}|Sorry, I was wrong. {S}|Update: {s}"

def tell(w, attr, v, change=False):
    """The user's message that states a fact."""
    r = w.r
    if change and attr in CHANGE and r.random() < 0.7: return c(r, CHANGE[attr]).format(v=v)
    s = c(r, FACTS[attr][1]).format(v=v)
    if change:
        s = re.sub(r"^(Hi!|Hi,|Hello,) ", "", s)
        first = s.split()[0]
        s = c(r, AGAIN).format(S=s, s=s if first in ("I", "I'm") else s[0].lower() + s[1:])
    return s

def reply(w, attr, v):
    """A reply that names the value most of the time, else a plain one."""
    if w.r.random() < (0.1 if attr == "name" else 0.4): return c(w.r, PLAIN)
    template = c(w.r, FACTS[attr][2])
    if template.startswith("{v}") and not v[0].isupper() and not v[0].isdigit(): return c(w.r, PLAIN)  # no lower-case start
    return template.replace("{v}", v)

def profile(w, n=None, size=0):
    """Facts about the user, now and then changed (the latest wins), and questions: some right away, the rest at the end."""
    r = w.r
    n = n or r.choice((1, 1, 2, 2, 3, 3, 4, 5, 6))
    attrs = []
    while len(attrs) < n:
        a = r.choice(COMMON) if r.random() < 0.6 else r.choice(list(FACTS))
        if a not in attrs: attrs.append(a)
    known, turns, kase = {}, [], (lambda s: s.lower() if w.low else s)
    i = 0
    while i < n:
        a = attrs[i]; v = kase(FACTS[a][0](w)); i += 1
        text = tell(w, a, v); known[a] = v
        if i < n and r.random() < 0.3:                                       # two facts in one message
            b = attrs[i]; u = kase(FACTS[b][0](w)); i += 1
            second = tell(w, b, u); second = re.sub(r"^(Hi!|Hi,|Hello,) ", "", second)
            if r.random() < 0.5: text = text.rstrip(".!") + " and " + (second if second.split()[0] in ("I", "I'm") else second[0].lower() + second[1:])
            else: text += " " + second
            known[b] = u
            turns.append((w.say(text), c(r, PLAIN)))
        else: turns.append((w.say(text), reply(w, a, v)))
        if r.random() < 0.15:
            x = r.choice(list(known)); turns.append(question(w, x, known[x]))
        if r.random() < 0.12:
            x = r.choice(list(known)); known[x] = kase(FACTS[x][0](w))
            turns.append((w.say(tell(w, x, known[x], True)), reply(w, x, known[x])))
        if r.random() < 0.06:
            x = r.choice(list(FACTS) + COMMON * 3)
            if x not in known: turns.append(question(w, x, None))
    asked = list(known); r.shuffle(asked)
    for x in asked[: r.choice((1, 1, 2, 3))]: turns.append(question(w, x, known[x]))
    if n <= 4 and r.random() < 0.08 and not w.held:
        turns.append((w.say(c(r, "What do you know about me?|Tell me what you know about me.|What have I told you?")),
                      " ".join(FACTS[x][4].format(v=known[x]) for x in known)))
    return turns

def question(w, attr, v):
    """A question about the user and its answer; v None: never told."""
    q = c(w.r, FACTS[attr][3])
    if w.r.random() < 0.06: q = c(w.r, "Please tell me: |Now tell me: |One question: |Hey, ") + q[0].lower() + q[1:]
    return w.say(q), (FACTS[attr][4].format(v=v) if v is not None else FACTS[attr][5].replace("You have", "«You have»"))

def unknown(w, size=0):
    """Questions about facts never told, alone."""
    return [question(w, w.r.choice(COMMON + list(FACTS)), None)]

# ----------------------------------------------------------------------------------------------- facts about other people
PEOPLE = [  # (draw, statement, question, answer); {n} the person, {p}/{P}/{o} pronouns
    (lambda w: w.pick(CITIES), "{n} lives in {v}.", "Where does {n} live?|In which city does {n} live?", "You said that {n} lives in «{v}».", "{P} lives in {v}."),
    (lambda w: w.pick(JOBS), "{n} works as a {v}.", "What does {n} work as?|What is {n}'s job?", "You said that {n} works as a «{v}».", "{P} works as a {v}."),
    (lambda w: w.pick(FOODS), "{n} likes {v}.", "What does {n} like?|What does {n} like to eat?", "You said that {n} likes «{v}».", "{P} likes {v}."),
    (lambda w: w.pick(COLOURS), "{n}'s favourite colour is {v}.", "What is {n}'s favourite colour?", "You said that {n}'s favourite colour is «{v}».", "{H} favourite colour is {v}."),
    (lambda w: str(w.r.randrange(8, 95)), "{n} is {v} years old.", "How old is {n}?|What is the age of {n}?", "You said that {n} is «{v}» years old.", "{P} is {v} years old."),
    (lambda w: w.pick(HOBBIES), "{n} enjoys {v}.", "What does {n} enjoy?|What is {n}'s hobby?", "You said that {n} enjoys «{v}».", "{P} enjoys {v}."),
    (lambda w: w.name(), "{n} has a dog called {v}.", "What is {n}'s dog called?|What is the name of {n}'s dog?", "You said that {n} has a dog called «{v}».", "{P} has a dog called {v}."),
    (lambda w: w.code(), "{n}'s number is {v}.", "What is {n}'s number?", "You said that {n}'s number is «{v}».", "{H} number is {v}."),
    (lambda w: w.pick(ANIMALS), "{n} saw a {v}.", "What did {n} see?|Which animal did {n} see?", "You said that {n} saw a «{v}».", "{P} saw a {v}."),
]

def people(w, size=0, crowd=False):
    """Several people with the same or different facts: in one message or one each turn; a question or two. `crowd`: more of them, over several messages."""
    r = w.r
    n = r.choice((3, 4, 5, 5) if crowd else (2, 2, 3, 3, 4, 5))
    kinds = r.sample(PEOPLE, r.choice((1, 2, 2) if crowd else (1, 1, 2)))
    facts = []
    for _ in range(n):
        name = w.name()
        for k in kinds:
            v = k[0](w)
            if w.low: name, v = name.lower(), v.lower()
            facts.append((k, name, v))
    if r.random() < 0.5: r.shuffle(facts)
    says = [k[1].format(n=a, v=v) for k, a, v in facts]
    x = 0.5 if crowd else r.random()
    if x < 0.35: turns = [(w.say((document(r, says, size))), c(r, PLAIN))]
    elif x < 0.7: turns = scatter(w, says, size)
    else: turns = [(w.say(s), c(r, PLAIN)) for s in says]
    for k, a, v in r.sample(facts, r.choice((1, 1, 2))):
        turns.append((w.say(c(r, k[2]).format(n=a)), k[3].format(n=a, v=v)))
    return turns

def crowd(w, size=0): return people(w, size, True)

def coref(w, size=0):
    """The person is named once; pronouns say the rest, distractors come between."""
    r = w.r
    female = r.random() < 0.5
    p, P, H = ("she", "She", "Her") if female else ("he", "He", "His")
    name = w.name().lower() if w.low else w.name()
    rel = c(r, "friend|neighbour|cousin|teacher|boss|colleague")
    turns = [(w.say(c(r, (f"I have a {rel} called {name}.", f"My {rel} is {name}.", f"Let me tell you about my {rel} {name}.", f"Yesterday I met {name}."))), c(r, PLAIN + f"|Tell me more about «{name}»."))]
    kinds = r.sample(PEOPLE, r.choice((1, 2, 2, 3)))
    if r.random() < 0.5:                                                    # the same about somebody else, before
        other = w.name().lower() if w.low else w.name()
        says = [k[1].format(n=other, v=k[0](w)) for k in kinds]
        turns = [(w.say(s.lower() if w.low else s), c(r, PLAIN)) for s in says] + turns
    vals = []
    for k in kinds:
        v = k[0](w); v = v.lower() if w.low else v
        vals.append(v)
        turns.append((w.say(k[4].format(P=P, H=H, v=v)), c(r, PLAIN)))
    for i in r.sample(range(len(kinds)), min(len(kinds), r.choice((1, 1, 2)))):
        turns.append((w.say(c(r, kinds[i][2]).format(n=name)), kinds[i][3].format(n=name, v=vals[i])))
    return turns

# --------------------------------------------------------------------------------------------- needles, keys and values
def read_then_ask(w, text, asks, intro=None):
    """The text and its questions: in one message, or the text first and the questions in turns of their own."""
    r = w.r
    intro = intro if intro is not None else c(r, "|||Read this text. |Here is a text: |Remember this. |Please read: ")
    if not w.apart and r.random() < 0.5:
        q, a = asks[0]
        gap = "\n" if "\n" in text else " "
        pieces, x = re.split("(?<=\n)" if gap == "\n" else r"(?<=[.!?]) ", text), r.random()
        if x < 0.35: whole = f"{q}{gap}{intro}{text}"                        # the question before the text,
        elif x < 0.65 and len(pieces) > 1:                                  # in the midst of it,
            k = r.randrange(1, len(pieces)); join_ = "" if gap == "\n" else " "
            whole = intro + join_.join(pieces[:k]).rstrip() + gap + q + gap + join_.join(pieces[k:])
        else: whole = f"{intro}{text}{gap}{q}"                               # or behind it
        return [(w.say(whole), a)] + [(w.say(q), a) for q, a in asks[1:]]
    if r.random() < 0.3:                                                    # the text in two or three messages
        pieces = re.split("(?<=\n)" if "\n" in text else r"(?<=[.!?]) ", text)
        cuts = [0] + sorted(r.randrange(1, len(pieces) + 1) for _ in range(r.choice((1, 2)))) + [len(pieces)]
        parts = [("" if "\n" in text else " ").join(pieces[a:b]).rstrip() for a, b in zip(cuts, cuts[1:]) if b > a]
        return [(w.say((intro if not i else "") + p), c(r, "I have read it.|Okay.|Got it.|I will remember that.|Understood.")) for i, p in enumerate(parts)] + [(w.say(q), a) for q, a in asks]
    return [(w.say(intro + text), c(r, "I have read it.|Okay.|Got it.|I will remember that.|Understood."))] + [(w.say(q), a) for q, a in asks]

def needle(w, size=0, n=None):
    """'The secret code of the red box is 4821.' somewhere in filler; n needles, one or two asked."""
    r = w.r
    n = n or r.choice((1, 1, 1, 2, 3, 4, 6))
    facts, kind = [], r.randrange(4)
    for i in range(n):
        t = w.thing() if not i or r.random() < 0.6 else w.near(t)
        v = w.code() if r.random() < 0.7 else w.word()
        place = r.choice(ROOMS)
        s, q, a = ((f"The secret code of the {t} is {v}.", c(r, f"What is the secret code of the {t}?|What is the code of the {t}?|Tell me the secret code of the {t}."), f"The secret code of the {t} is «{v}»."),
                   (f"The {t} costs {v} coins.", c(r, f"How much does the {t} cost?|What does the {t} cost?"), f"The {t} costs «{v}» coins."),
                   (f"The {t} is in the {place}.", c(r, f"Where is the {t}?|Where can I find the {t}?"), f"The {t} is in the «{place}»."),
                   (f"The number of the {t} is {v}.", c(r, f"What is the number of the {t}?|Which number does the {t} have?"), f"The number of the {t} is «{v}»."))[kind if r.random() < 0.8 else r.randrange(4)]
        if w.low: s, a = s.lower(), a[0] + a[1:].lower()
        facts.append((s, (q, a)))
    text = document(r, [s for s, _ in facts], size)
    asks = [x for _, x in r.sample(facts, min(n, r.choice((1, 1, 2))))]
    if len(asks) == 2 and r.random() < 0.4: asks = [(asks[0][0] + " " + asks[1][0], asks[0][1] + " " + asks[1][1])]  # both in one message
    return read_then_ask(w, text, asks)

def multi_needle(w, size=0): return needle(w, size, w.r.choice((3, 4, 5, 6, 8)))
def single_needle(w, size=0): return needle(w, size, 1)

def multi_value(w, size=0):
    """One key, several values, all of them asked."""
    r = w.r
    t, n = w.thing(), r.choice((2, 2, 3, 4))
    vals = []
    while len(vals) < n:
        v = w.code()
        if v not in vals: vals.append(v)
    says = [f"A number of the {t} is {v}." for v in vals]
    other = w.near(t)
    if r.random() < 0.5: says.insert(r.randrange(n + 1), f"A number of the {other} is {w.code()}.")
    return read_then_ask(w, document(r, says, size), [(c(r, f"What are the numbers of the {t}?|Tell me all numbers of the {t}.|Which numbers does the {t} have?"),
                                                       f"The numbers of the {t} are {answers(vals)}.")])

def key_values(w, size=0):
    """Look-up in JSON, code or lines of text; the size sets the number of entries."""
    r = w.r
    n = max(2, min(size // 9, 200)) if size else r.choice((2, 3, 4, 6, 8))
    keys, kind = [], r.randrange(3)
    while len(keys) < n:
        k = (r.choice(NAMES) if r.random() < 0.35 else "".join(r.choice(SYLLABLES) for _ in range(r.choice((2, 3, 3))))).lower()
        if keys and r.random() < 0.1: k = keys[-1][:-2] + r.choice(SYLLABLES)
        if k not in keys: keys.append(k)
    vals = [w.code() if r.random() < 0.8 else w.word() for _ in keys]
    quoted = [v if v.isdigit() or kind else f'"{v}"' for v in vals]
    if kind == 0:                                                           # one object, or one on each of two lines
        k = r.randrange(1, n) if r.random() < 0.5 else n
        objects = [[f'"{a}": {b}' for a, b in zip(keys[i:j], quoted[i:j])] for i, j in ((0, k), (k, n)) if i < j]
        text = "\n".join("{" + ", ".join(o) + "}" for o in objects)
    elif kind == 1: text = "\n".join(f"{k} = {v}" for k, v in zip(keys, vals))
    else: text = c(r, "\n| ").join(f"{k} is {v}." for k, v in zip(keys, vals))
    asks = []
    for i in r.sample(range(n), min(n, r.choice((1, 1, 2)))):
        k, v = keys[i], quoted[i]
        asks.append((c(r, f"What is the value of {k}?|What is {k}?|Look up {k}.|Tell me the value of {k}."), f"The value of {k} is «{v}»."))
    return read_then_ask(w, text, asks, c(r, "|Here are some values.\n|Remember these values:\n|Here is a table.\n"))

# ------------------------------------------------------------------------------------------ things that change, and lists
def status(w, size=0):
    """Where things are, how they are: they change, the latest wins."""
    r = w.r
    n, changes = r.choice((1, 1, 2, 3)), r.choice((1, 1, 2, 3))
    things = [w.thing() if r.random() < 0.5 else w.fresh(lambda: r.choice(THINGS)) for _ in range(n)]
    kind = r.randrange(3)
    def draw(old=None):
        while True:
            v = r.choice(SPOTS) if kind == 0 else r.choice(COLOURS) if kind == 1 else str(r.randrange(2, 100))
            if v != old: return v
    form = (("I put the {t} in the {v}.|The {t} is in the {v}.", "I moved the {t} to the {v}.|Now the {t} is in the {v}.|I put the {t} in the {v}.", "Where is the {t}?|Where is the {t} now?|Where did I put the {t}?", "The {t} is in the «{v}»."),
            ("The {t} is {v}.", "I painted the {t} {v}.|Now the {t} is {v}.|The {t} is now {v}.", "What colour is the {t}?|What colour is the {t} now?|Which colour has the {t}?", "The {t} is «{v}»."),
            ("The price of the {t} is {v}.", "The price of the {t} is now {v}.|Now the price of the {t} is {v}.|The new price of the {t} is {v}.", "What is the price of the {t}?|What is the price of the {t} now?|How much is the {t}?", "The price of the {t} is «{v}»."))[kind]
    if kind == 1: things = [t.split()[-1] for t in things]
    things = list(dict.fromkeys(things))
    now, says = {}, []
    for t in things: now[t] = draw(); says.append(c(r, form[0]).format(t=t, v=now[t]))
    for _ in range(changes):
        t = r.choice(things); now[t] = draw(now[t]); says.append(c(r, form[1]).format(t=t, v=now[t]))
    if r.random() < 0.4: turns = [(w.say(document(r, says, size)), c(r, PLAIN))]
    else: turns = [(w.say(s), c(r, PLAIN)) for s in says]
    for t in r.sample(things, 1 if r.random() < 0.7 else min(2, len(things))):
        turns.append((w.say(c(r, form[2]).format(t=t)), form[3].format(t=t, v=now[t])))
    return turns

def lists(w, size=0):
    """A list, told at once or item by item, asked back in order."""
    r = w.r
    what, pool = r.choice((("shopping list", FOODS), ("packing list", THINGS), ("guest list", NAMES), ("animal list", ANIMALS), ("travel list", CITIES)))
    n = r.choice((2, 2, 3, 3, 4, 5)) if size < 100 else r.choice((2, 3, 4, 5, 6, 8, 12, 16, 24))
    n = min(n, sum((i % 8 == 5) == w.held for i in range(len(pool))))       # there are few held-out words
    items = []
    while len(items) < n:
        x = w.pick(pool); x = x.lower() if w.low else x
        if x not in items: items.append(x)
    k = r.choice((n, n, max(1, n - 1), 1)) if n < 6 else r.choice((n, n, n - 1, n // 2))
    turns = [(w.say(c(r, (f"My {what}: {join(items[:k])}.", f"Put {join(items[:k])} on my {what}.", f"My {what} has {join(items[:k])}.", f"Please remember my {what}: {join(items[:k])}.",
             f"I need to buy {join(items[:k])}." if pool is FOODS else f"My {what}: {join(items[:k])}."))), c(r, PLAIN))]
    short = c(r, (what, "list")) if r.random() < 0.3 else what
    if n >= 6 and k < n: turns.append((w.say(f"Add {join(items[k:])}."), c(r, PLAIN))); k = n
    for x in items[k:]: turns.append((w.say(c(r, (f"Add {x}.", f"Also add {x} to my {what}.", f"Put {x} on my {what}."))), c(r, f"I added «{x}».|Okay.|Done.")))
    turns.append((w.say(c(r, f"What is on my {short}?|Tell me my {short}.|Show me my {short}.|Read me my {short}." + ("|What do I need to buy?" if pool is FOODS else ""))), f"Your {what}: {answers(items)}."))
    return turns

def chain(w, size=0):
    """Two steps: A has B, B is at C. The answer says the first step, then the second."""
    r = w.r
    n = r.choice((1, 2, 2, 3))
    pairs = [(w.name(), w.name(), w.pick(CITIES)) for _ in range(n)]
    kind = r.randrange(3)
    verb = ("works with", "is married to", "is a friend of")[kind]
    says = [f"{a} {verb} {b}." for a, b, _ in pairs] + [f"{b} lives in {v}." for _, b, v in pairs]
    r.shuffle(says)
    if w.low: says, pairs = [s.lower() for s in says], [tuple(x.lower() for x in p) for p in pairs]
    a, b, v = r.choice(pairs)
    q = (f"Where does the person live who {a} works with?", f"Where does the person live who {a} is married to?", f"Where does the friend of {a} live?")[kind]
    return read_then_ask(w, document(r, says, size), [(q, f"You said that {a} {verb} «{b}», and {b} lives in «{v}».")])

def sums(w, size=0):
    """Two amounts, told apart, added up: the answer names both first."""
    r = w.r
    what, n = c(r, "coins|books|apples|eggs|stones|keys|cups|balls"), r.choice((2, 2, 3, 4))
    owners, amounts = [w.name() for _ in range(n)], [r.randrange(1, 13) for _ in range(n)]
    if w.low: owners = [a.lower() for a in owners]
    says = [c(r, f"{a} has {v} {what}.|{a} owns {v} {what}.") for a, v in zip(owners, amounts)]
    i, j = r.sample(range(n), 2)
    q = c(r, f"How many {what} do {owners[i]} and {owners[j]} have together?|How many {what} have {owners[i]} and {owners[j]}?")
    a = f"You said that {owners[i]} has «{amounts[i]}» and {owners[j]} has «{amounts[j]}»: together «{amounts[i] + amounts[j]}»."
    if r.random() < 0.5: return [(w.say(s), c(r, PLAIN)) for s in says] + [(w.say(q), a)]
    return read_then_ask(w, document(r, says, size), [(q, a)])

# ------------------------------------------------------------------------------------ rules, examples, the main sentence
CLASSES = {"animal": ANIMALS, "food": FOODS, "city": CITIES, "colour": COLOURS, "job": JOBS, "person": NAMES[:80], "thing": THINGS, "hobby": HOBBIES}

def kinds(w, size=0):
    """What a word stands for: a few questions, each by itself."""
    r, turns = w.r, []
    for _ in range(r.choice((2, 3, 4, 6))):
        k = r.choice(list(CLASSES)); x = r.choice(CLASSES[k])
        other = r.choice([y for y in CLASSES if y != k])
        a, b = (k, other) if r.random() < 0.5 else (other, k)
        turns.append((w.say(c(r, f"What kind of word is {x}?|What kind of thing is {x}?|Which class is {x} in?|Is {x} {an(a)} or {an(b)}?|{x} belongs to which kind?")), f"That is {an(k)[:-len(k)]}«{k}»."))
    return turns

def classify(w, size=0):
    """Few-shot classification: the labels are defined by examples alone."""
    r = w.r
    kinds = r.sample(list(CLASSES), r.choice((2, 2, 3, 3)))
    labels = kinds if r.random() < 0.5 else r.sample("A B C D X Y Z one two left right zip zap foo bar".split(), len(kinds))
    shots, used = [], set()
    for k, l in zip(kinds, labels):
        for _ in range(r.choice((2, 3, 3))):
            x = r.choice([y for y in CLASSES[k] if y not in used]); used.add(x); shots.append((x, l))
    r.shuffle(shots)
    i = r.randrange(len(kinds))
    x = r.choice([y for y in CLASSES[kinds[i]] if y not in used])
    if r.random() < 0.35:                                                   # the examples come in two messages
        k = r.randrange(1, len(shots))
        first, shots = "\n".join(f"{a}: {l}" for a, l in shots[:k]), shots[k:]
        if size: first = " ".join(filler(r, size)) + "\n" + first
        text = "\n".join(f"{a}: {l}" for a, l in shots)
        return [(first, c(r, "I have read it.|Okay.|Got it.|I will remember that.|Understood.")), (f"{text}\n{x}:", f"The label is «{labels[i]}».")]
    text = "\n".join(f"{a}: {l}" for a, l in shots)
    if size: text = " ".join(filler(r, size)) + "\n" + text
    return [(f"{text}\n{x}:", f"The label is «{labels[i]}».")]

def summary(w, size=0):
    """The one sentence that matters, marked as such."""
    r = w.r
    v = r.choice((f"the {r.choice(NOUNS)} is closed on {r.choice(DAYS)}", f"the {r.choice(THINGS)} must not be {r.choice('opened moved sold painted'.split())}", f"{w.name()} will come to {w.pick(CITIES)} on {r.choice(DAYS)}",
                  f"the meeting is in the {r.choice(ROOMS)} at {r.randrange(1, 13)}", f"the {r.choice(NOUNS)} needs a new {r.choice(THINGS)}"))
    mark = c(r, "The main point is that {v}.|Important: {v}.|The most important thing is that {v}.").format(v=v)
    text = document(r, [mark], size or r.choice((20, 40, 80)))
    return read_then_ask(w, text, [(c(r, "What is the main point?|Give me a summary.|Sum this up.|What is the most important thing?|Summarize the text."), f"The main point is that «{v.lower() if w.low else v}».")])

def constraint(w, size=0):
    """A rule for all later replies: begin or end each with a given word."""
    r = w.r
    word = c(r, "Captain|Sir|Madam|Boss|Friend|Chief|Doctor|Professor|Master|Dear")
    end = r.random() < 0.4
    ask = c(r, (f"From now on end every answer with {word}.", f"Please end all your answers with the word {word}.") if end else
               (f"From now on start every answer with {word}.", f"Please begin all your answers with the word {word}.", f"Call me {word} in every answer."))
    if "Call me" in ask: end = False
    def obey(text):
        return text[:-1] + f", «{word}»" + text[-1] if end else f"«{word}», " + (text if text[:2] in ("I ", "I'") or text[0] == "«" else text[0].lower() + text[1:])
    turns = [(w.say(ask), obey("Okay."))]
    for _ in range(r.choice((1, 1, 2))):
        a = r.choice(COMMON); v = FACTS[a][0](w); v = v.lower() if w.low else v
        turns.append((w.say(tell(w, a, v)), obey(c(r, PLAIN))))
        q, t = question(w, a, v)
        turns.append((q, obey(t)))
    return turns

# --------------------------------------------------------------------------------------------------------------- chats
TASKS = {  # task: (thread maker, share in the mixture)
    "profile": (profile, 16), "unknown": (unknown, 2), "people": (people, 15), "coref": (coref, 6), "needle": (needle, 9), "multi_needle": (multi_needle, 8),
    "multi_value": (multi_value, 24), "key_values": (key_values, 17), "status": (status, 10), "lists": (lists, 17), "chain": (chain, 9), "sums": (sums, 5),
    "classify": (classify, 14), "kinds": (kinds, 5), "summary": (summary, 4), "constraint": (constraint, 3), "story": (story_thread, 7),
    "crowd": (crowd, 0),                                                    # for the Nexus adapter alone
}
SYSTEMS = ["You are a helpful assistant.", "You are a small and friendly model.", "You are kvcomp, a small assistant.", "Answer briefly.", "You are Tiny, a helpful assistant. Be polite."]
OVERHEAD = 11                                                              # tokens of the template around one turn

def cost(turn):
    """About how many tokens a turn takes."""
    return OVERHEAD + int((len(turn[0]) + len(turn[1])) / 4.3)

def distract(w):
    """A turn or two that no question will be about."""
    r = w.r
    x = r.random()
    if x < 0.62: return [talk(w)]
    if x < 0.74: return story_thread(w)[:1]
    return [(w.say(" ".join(filler(r, r.choice((20, 40, 80, 120))))), c(r, "I see.|Interesting.|Okay.|That sounds nice."))]

def weave(r, threads):
    """One list of turns; every thread keeps its order; the first thread's last turn comes last."""
    slots = [i for i, t in enumerate(threads) for _ in t]
    slots.remove(0); r.shuffle(slots); slots.append(0)
    its = [iter(t) for t in threads]
    return [next(its[i]) for i in slots]

def make_chat(r, target=256, task=None, held=False, apart=None):
    """A chat of about `target` tokens whose last turn belongs to `task`. Returns (system or None, turns).
    `apart`: shares of the tasks in another mixture, in which the questions about a text always stand in later turns."""
    w = World(r, held, bool(apart))
    weights = [apart.get(t, 0) if apart else s for t, (_, s) in TASKS.items()]
    task = task or r.choices(list(TASKS) + ["talk"], weights + [16])[0]
    if task == "talk": threads, room = [[talk(w) for _ in range(r.choice((1, 1, 2, 3, 4)))]], 0
    else:
        share = r.choice((0, 0.3, 0.6, 0.9)) if target > 150 else r.choice((0, 0, 0.4))
        threads = [TASKS[task][0](w, size=int(target * share))]
        room = target - sum(map(cost, threads[0]))
        if not held and r.random() < 0.3 and target > 120:                   # a second task in the same chat
            other = r.choices(list(TASKS), weights)[0]
            if other != task and {other, task} != {"needle", "multi_needle"} and "unknown" not in (other, task) and not {"constraint"} & {other, task} \
               and not ({"profile", "coref"} <= {other, task}):
                threads.append(TASKS[other][0](w)); room -= sum(map(cost, threads[1]))
    busy = "constraint" == task                                             # small talk would have to obey the rule: leave it out
    extra = []
    if target > 150 or r.random() < 0.35:
        while room > 30 and not busy:
            d = distract(w)
            room -= sum(map(cost, d))
            if room > -20: extra.append(d)
    turns = weave(r, threads + extra)
    return (r.choice(SYSTEMS) if r.random() < 0.25 else None), turns

def render(system, turns):
    """The chat in the chatml template, and the answers' character spans, and the assistants' spans."""
    out, spans, replies, at = [], [], [], 0
    def put(text):
        nonlocal at
        out.append(text); at += len(text)
    if system: put(f"<|im_start|>system\n{system}<|im_end|>\n")
    for user, assistant in turns:
        put(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n")
        begin = at
        for i, piece in enumerate(re.split("[«»]", assistant)):
            if i % 2: spans.append((at, at + len(piece)))
            put(piece)
        put("<|im_end|>")
        replies.append((begin, at))
        put("\n")
    return "".join(out), spans, replies

if __name__ == "__main__":
    r = random.Random(1)
    for i in range(int(sys.argv[1]) if len(sys.argv) > 1 else 10):
        print(render(*make_chat(r, r.choice((64, 128, 256))))[0] + "\n----")
