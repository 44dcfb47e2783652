"""Answers of responses and of tasks, from both sides: right ones in another form, and other ones."""

import pytest

from trinity_lightning.explorer.rewards.answers import math_boxed_or_last
from trinity_lightning.explorer.rewards.equality import same_answer
from trinity_lightning.explorer.tasks.task import Task

# In each line a response's answer and a task's, which are the same (≡) or not (≢).
TABLE = r"""
# Numbers. GSM8K's answers behind ####, with commas (arXiv 2110.14168); Minerva's normalisation leaves commas out (arXiv
# 2206.14858, D.1); math-verify's tests for spaces between thousands. A decimal comma is not read, unlike there.
1,000 ≡ 1000
1000 ≡ 1,000
1 000 ≡ 1000
12 345 678 ≡ 12345678
1\,000 ≡ 1000
1,000,000 ≡ 1000000
10,00 ≢ 1000
1,000 ≢ 1
1.000,5 ≢ 1000.5
007 ≡ 7
5. ≡ 5
5.0 ≡ 5
5.00 ≡ 5
.5 ≡ 0.5
0.50 ≡ .5
5.01 ≢ 5
3.14 ≢ \pi
3.141593 ≡ \pi
0.333 ≢ 1/3
0.333333 ≢ 1/3
1e3 ≡ 1000
1E3 ≡ 1000
10^3 ≡ 1000
10^{-3} ≡ 0.001
1000 ≡ 10^3
6.02 \times 10^{23} ≡ 6.02e23
2 \cdot 10^3 ≡ 2000
5! ≡ 120
5! ≢ 5
2^{10} ≡ 1024
-5 ≢ 5
5 ≢ -5
−5 ≡ -5
–5 ≡ -5
- 5 ≡ -5
+5 ≡ 5
-0 ≡ 0
\minus5 ≢ -5
negative 5 ≡ -5
minus 5 ≡ -5
\text{negative } 5 ≡ -5
negative 5 ≢ 5
\pm 2 ≢ 2
2 ≢ \pm 2
\pm 2 ≡ 2, -2
\pm 2 ≡ -2, 2
2, -2 ≡ \pm 2
±2 ≡ \pm 2
x = \pm 2 ≡ \pm 2
\pm 3 ≢ \pm 2
# Fractions, ratios, times. MATH's grader reads \frac12, \tfrac and a/b as one (arXiv 2103.03874); PRM800K's reads mixed
# numbers (arXiv 2305.20050); repeating decimals are answers of MATH.
1/2 ≡ 0.5
\frac12 ≡ 0.5
\frac12 ≡ \frac{1}{2}
\frac 12 ≡ 1/2
\frac{1}2 ≡ 1/2
\frac1{2} ≡ 1/2
\cfrac{1}{2} ≡ 1/2
\tfrac12 ≡ 0.5
{1}/{2} ≡ 1/2
1 / 2 ≡ 1/2
½ ≡ 1/2
2½ ≡ 2.5
-\frac{1}{2} ≡ \frac{-1}{2}
\frac{1}{-2} ≡ -1/2
\frac{-1}{-2} ≡ 1/2
\frac{2}{4} ≡ 1/2
1/2 ≢ 2
\frac{1}{2} ≢ \frac{2}{1}
3 1/2 ≡ 3.5
3 1/2 ≢ 31/2
1 1/2 ≢ 11/2
1\frac12 ≡ 3/2
3\frac{1}{2} ≡ \frac{7}{2}
3 \frac{1}{2} ≢ 3/2
3-1/2 ≢ 3.5
-1 1/2 ≡ -1.5
-1 1/2 ≢ -0.5
5:2 ≡ 5/2
3:2 ≡ 3:2
3 : 2 ≡ 3:2
3:2 ≢ 2:3
6:4 ≡ 3:2
3 to 2 ≡ 3:2
12:30 ≡ 12:30
12:30 ≢ 12:31
12:30 PM ≡ 12:30
12:30 PM ≢ 12:30 AM
12:30 p.m. ≡ 12:30 PM
12:30\text{ p.m.} ≡ 12:30 PM
m ≡ m
1.0 ≡ 1
1,000.50 ≡ 1000.5
0.30000001 ≢ 0.3
1/3 ≢ 0.3333333333
2/3 ≡ 4/6
\binom{10}{3} ≡ 120
2^{100} ≡ 1267650600228229401496703205376
1.5 \times 10^{-4} ≡ 0.00015
1.5e-4 ≡ 0.00015
1.5 x 10^-4 ≡ 0.00015
1.5 * 10^4 ≡ 15000
1.5 \times 10^{3} ≢ 1.5 \times 10^{4}
-1 ≢ 1
\frac{-1}{2} ≢ \frac{1}{2}
--5 ≡ 5
n \equiv 2 \pmod{5} ≢ 2
i ≢ -i
-i ≢ i
\vec{a} ≢ \vec{b}
{5} ≡ 5
$ 5 $ ≡ 5
# Percent and money. MATH's grader leaves out \% and \$; GSM8K asks for dollars and cents; math-verify's tests have 28%
# equal to 28; that it is 0.28, too, and that currencies differ, is decided here.
50% ≡ 0.5
50\% ≡ 50
50 percent ≡ 50\%
50 percent ≡ 0.5
50\text{ percent} ≡ 50
50% ≢ 5
0.5 ≡ 50%
0.5% ≢ 50%
0.5% ≡ 0.5
50 ≢ 0.5
$5 ≡ 5
\$5 ≡ 5
5 dollars ≡ 5
$5.00 ≡ 5
5 ≡ $5
\$1,234.50 ≡ 1234.5
$5 ≢ €5
50 cents ≡ $0.50
50\text{ cents} ≡ 50
50 cents ≢ 50 dollars
5 USD ≡ \$5
£3 ≡ 3 pounds
₹5 ≡ 5
₹5 ≢ $5
Rs. 5 ≡ 5
$12 per hour ≡ 12
12 dollars per hour ≡ $12 per hour
5 million ≡ 5000000
5 million ≢ 5
5 million dollars ≡ $5 million
$1.5 million ≡ 1500000
2 dozen ≡ 24
3 hundred ≡ 300
2.5 thousand ≡ 2500
$1,000$ ≡ 1000
5 \% ≡ 5
5 \% ≡ 0.05
\frac{1}{2}\% ≡ 0.5\%
\frac{1}{2} ≡ 50\%
33.3\% ≢ \frac{1}{3}
33\frac{1}{3}\% ≡ \frac{1}{3}
100\% ≡ 1
100\% ≡ 100
0.5\% ≡ 0.005
\sqrt{2}\% ≡ \sqrt{2}
$$5$$ ≡ 5
# Units. Minerva and PRM800K leave units out, as MATH does behind \text; that two that differ are two answers, and equal
# ones convert, is decided here (OlympiadBench and SciBench give units).
5 cm ≡ 5
5 ≡ 5 cm
5cm ≡ 5 cm
5\text{ cm} ≡ 5 cm
5\,\mathrm{cm} ≡ 5\text{ cm}
5 centimeters ≡ 5 cm
5 cm ≢ 5 m
5\text{ cm} ≢ 5\text{ m}
500 cm ≡ 5 m
5 km ≡ 5000 m
60 minutes ≡ 1 hour
60 min ≡ 1 h
3 hours ≢ 3 days
1.5 hours ≡ 90 minutes
2 kg ≡ 2000 g
5 cm^2 ≡ 5
5\text{ cm}^2 ≡ 5 square centimeters
5 cm^2 ≢ 5 cm
5 cm^2 ≢ 5 cm^3
5 m² ≡ 5 m^2
5 sq. cm ≡ 5 cm^2
60 km/h ≡ 60
60 km/h ≡ 60 kilometers per hour
60 mph ≢ 60 km/h
60 mph ≡ 60 miles per hour
10\text{ m/s} ≡ 10 m/s
10 m/s ≡ 36 km/h
9.8 m/s^2 ≡ 9.8
90^\circ ≡ 90
90° ≡ 90
9 degrees ≡ 9
90 degrees ≡ 90^\circ
20°C ≡ 20
20°C ≢ 20°F
5 apples ≡ 5
5 apples ≢ 5 oranges
5 apples ≡ 5 Apples
1 apple ≡ 1 apples
5 red apples ≡ 5 apples
20 students ≡ 20
7 days ≡ 1 week
\frac{1}{2} \text{ cm} ≡ 0.5
2\pi \text{ cm} ≡ 2\pi
2\sqrt{3}\text{ cm} ≡ 2\sqrt{3}
2\sqrt{3}\text{ cm} ≢ 2\sqrt{3}\text{ m}
5m ≡ 5
5x ≢ 5
5a ≢ 5
3n ≢ 3
5 miles ≡ 5
5 ft ≡ 60 inches
1 liter ≡ 1000 mL
3 hours 30 minutes ≡ 3.5 hours
5 feet 6 inches ≡ 66 inches
5 feet 6 inches ≢ 5 feet
5'6" ≡ 5'6"
14:30 ≡ 14:30
2t ≢ 2
2 ≢ 2t
3h ≡ 3
3 ≢ 3h
5m ≢ 5n
2cm ≢ 2m
\frac{5}{2}\text{ m} ≡ 2.5\text{ m}
\frac{5}{2}\text{ m} ≢ 2.5\text{ cm}
12\text{ cm}^2 ≢ 12\text{ cm}^3
12\text{ cm}^2 ≡ 12
12 \mathrm{~cm}^{2} ≡ 12
12 \mathrm{~cm}^{2} ≢ 12 \mathrm{~m}^{2}
12 \mathrm{~km} / \mathrm{h} ≡ 12
12\text{ square units} ≡ 12
12 square units ≡ 12
12 units^2 ≡ 12
12 cubic feet ≡ 12
2 \text{ cm and } 3 \text{ cm} ≡ 2, 3
2 cm, 3 cm ≡ 3 cm, 2 cm
2 cm, 3 cm ≢ 2 m, 3 m
3 apples and 2 pears ≡ 2 pears and 3 apples
3 apples and 2 pears ≢ 2 apples and 3 pears
five apples ≡ 5
90^{\circ} ≡ 90
90^{\circ} ≢ 100^\circ
45 degrees ≢ 45 radians
25^\circ\text{C} ≢ 25^\circ\text{F}
25^\circ\text{C} ≡ 25 degrees Celsius
-40°F ≡ -40
5 N ≡ 5 newtons
# Bases. MATH's number theory writes 1011_2; math-verify leaves the index out, of whatever base.
101_2 ≡ 5
101_2 ≡ 101_2
101_{2} ≡ 101_2
101_2 ≡ 101
101 ≡ 101_2
1011_2 ≢ 1011_3
101_2 ≡ 12_3
110_2 ≢ 101_2
(101)_2 ≡ 101_2
101_{\text{two}} ≡ 101_2
101 \text{ base } 2 ≡ 101_2
101 (base 2) ≡ 101_2
1F_{16} ≡ 31
1F_{16} ≡ 1f_{16}
0x1F ≡ 31
0b101 ≡ 5
2A_{16} ≢ 2B_{16}
x_2 ≢ x_3
x_1 ≢ x
a_{10} ≢ a_{11}
2_{10} ≡ 2
1101_{2} ≡ 13
1101_{2} ≢ 1101_{3}
FF_{16} ≡ 255
12_8 ≡ 10
12_8 ≢ 12_9
12_8 ≡ 12
10_2 ≡ 2
# Qualifiers, and what stands around an answer. Minerva leaves out "an", "a", the full stop and ordinals' endings;
# MATH's counting problems ask for "at least"; decided here: what changes the value is another answer.
about 5 ≡ 5
approximately 5 ≡ 5
\approx 5 ≡ 5
≈ 5 ≡ 5
~5 ≡ 5
exactly 5 ≡ 5
at least 5 ≢ 5
at most 5 ≢ 5
more than 5 ≢ 5
less than 5 ≢ 5
\text{at least } 5 ≢ 5
at least 5 ≡ at least 5
at least 5 ≢ at most 5
5 or more ≢ 5
not 5 ≢ 5
\text{not } 5 ≢ 5
\neq 5 ≢ 5
> 5 ≢ 5
\geq 5 ≢ 5
x > 5 ≢ 5
x \geq 5 ≢ x > 5
5 or 6 ≢ 5
2 or 3 ≡ 2, 3
2 \text{ or } 3 ≡ 3, 2
2 and 3 ≡ 2, 3
2 or 3 ≢ 2
5th ≡ 5
5^{\text{th}} ≡ 5
5 more ≡ 5
5 less ≡ 5
5 per day ≡ 5
increase of 5 ≢ 5
5 (approximately) ≡ 5
5 times ≡ 5
5 pairs ≡ 5
0.\overline{3} ≡ 1/3
0.\overline{6} ≡ \frac23
0.\overline{3} ≢ 0.3
yes, it is ≢ no, it is not
= 5 ≡ 5
5 = 5 ≡ 5
answer: 5 ≡ 5
The answer is 5 ≡ 5
\text{The answer is } 5 ≡ 5
nearly 5 ≢ 5
5 is wrong ≢ 5
5 is not the answer ≢ 5
neither 5 nor 6 ≢ 5
between 5 and 6 ≢ 5
5-6 ≢ 5
5 to 6 ≢ 5
5+ ≢ 5
5 or less ≢ 5
up to 5 ≢ 5
over 5 ≢ 5
5? ≡ 5
5! ≢ 5
**5** ≡ 5
`5` ≡ 5
5, ≡ 5
5; ≡ 5
5: ≡ 5
# Equations and inequalities. MATH's grader leaves out "x ="; math-verify's tests for relations and the sets that they
# describe.
x=5 ≡ 5
x = 5 ≡ x=5
5 ≡ x=5
5 = x ≡ 5
5 = x ≡ x = 5
x=5 ≢ y=5
x=5 ≢ x=6
y=2x+1 ≡ 2x+1
2x+1 ≡ y=2x+1
y = 2x+1 ≡ 2x - y + 1 = 0
y=2x+1 ≢ y=2x-1
f(x)=2x ≡ 2x
x \le 3 ≡ x \leq 3
x ≤ 3 ≡ x \le 3
x <= 3 ≡ x \le 3
x \le 3 ≡ 3 \ge x
x \le 3 ≢ x < 3
x \le 3 ≢ x \ge 3
x \le 3 ≡ (-\infty, 3]
(-\infty, 3] ≡ x \le 3
1 < x < 2 ≡ (1,2)
x \in [1,2] ≡ [1,2]
[1,2] ≡ x \in [1,2]
x > 3 ≢ 3
2 + 3 = 5 ≡ 5
x = 2, y = 3 ≡ (2,3)
(x,y) = (2,3) ≡ (2,3)
x = 2, y = 3 ≢ x=3, y=2
x=2, x=3 ≡ 2,3
x=2 \text{ or } x=3 ≡ 2,3
x=-5 ≡ -5
x=-5 ≢ 5
x_1=2, x_2=3 ≡ 2, 3
a=1, b=2 ≢ a=2, b=1
y=3x ≡ 3x
y = 3x + 1 ≢ y = 3x - 1
x^2+y^2=1 ≡ y^2+x^2=1
x^2+y^2=1 ≢ x^2+y^2=2
x+y=3 ≡ y=3-x
a_n = 2n+1 ≡ 2n+1
# Tuples, sets, intervals, matrices. PRM800K's grader wants the same brackets and the same order; math-verify's tests
# for unions and matrices.
(1,2) ≡ (1, 2)
(1,2) ≢ (2,1)
(1,2) ≢ (1,2,3)
( 1 , 2 ) ≡ (1,2)
\left(1,2\right) ≡ (1,2)
1, 2 ≡ 2, 1
1,2 ≡ 1, 2
1, 2 ≢ 1, 3
1, 2, 3 ≢ 1, 2
{1,2} ≡ {2,1}
\{1,2\} ≡ \{2,1\}
\{1,2\} ≡ 1, 2
\{1,2\} ≢ (1,2)
[0,1) ≢ (0,1)
[0,1) ≡ [0, 1)
[0,1] ≢ (0,1)
[0,1] ≢ [1,0]
(0,1) ≢ [0,1]
(-\infty, 2) \cup (3, \infty) ≡ (3, \infty) \cup (-\infty, 2)
(-\infty,2)\cup(3,\infty) ≢ (-\infty,2)
(-∞, 2) ∪ (3, ∞) ≡ (-\infty,2)\cup(3,\infty)
\begin{pmatrix}1\\2\end{pmatrix} ≡ \begin{bmatrix}1\\2\end{bmatrix}
\begin{pmatrix}1\\2\end{pmatrix} ≢ \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1&2\end{pmatrix} ≢ \begin{pmatrix}1\\2\end{pmatrix}
\begin{pmatrix} 0.5 \\ 2 \end{pmatrix} ≡ \begin{pmatrix} 1/2 \\ 2 \end{pmatrix}
\langle 1, 2 \rangle ≡ (1,2)
(0.5, 2) ≡ (\frac12, 2)
(1,234) ≢ (1234)
(1, 234, 5) ≡ (1,234,5)
1,23 ≢ 123
(1,2) ≡ 1,2
(1, 2, 3) ≢ (3, 2, 1)
(-1, 2) ≢ (1, -2)
(3, \frac{\pi}{2}) ≡ (3, \pi/2)
(1,2],(3,4) ≢ (1,2]
[-1,1] ≡ -1 \le x \le 1
-1 \le x \le 1 ≡ [-1,1]
-1 < x < 1 ≢ [-1,1]
x \geq 1 ≡ [1, \infty)
x > 1 ≢ [1,\infty)
\{x | x > 1\} ≢ (1, \infty)
\mathbb{R} ≡ (-\infty,\infty)
\emptyset ≡ \varnothing
\emptyset ≡ \{\}
\text{no solution} ≡ \emptyset
\{1\} ≡ 1
\{1,2,3\} ≡ \{3,2,1\}
\{1,2,3\} ≢ \{1,2\}
\{1,2\} ≢ [1,2]
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ≡ \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ≢ \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix} ≡ \begin{pmatrix} -\frac13 \\ \frac23 \\ \frac53 \end{pmatrix}
\sqrt[3]{8} ≡ 2
[5] ≡ 5
(5) ≡ 5
\(5\) ≡ 5
\[5\] ≡ 5
# Expressions. MATH's grader for \sqrt2; math-verify's tests; symbols in plain text and Unicode, as models write.
$\sqrt{2}/2$ ≡ 1/\sqrt2
\frac{\sqrt{2}}{2} ≡ \frac{1}{\sqrt{2}}
√2 ≡ \sqrt{2}
2√3 ≡ 2\sqrt{3}
sqrt(2) ≡ \sqrt{2}
sqrt(2)/2 ≡ \frac{\sqrt2}{2}
\sqrt2 ≡ \sqrt{2}
\sqrt{2} ≢ \sqrt{3}
2 \pi ≡ 2\pi
2π ≡ 2\pi
2pi ≡ 2\pi
2*pi ≡ 2\pi
2 \pi ≢ 2
6.283185 ≡ 2\pi
6.28 ≢ 2\pi
\frac{\pi}{2} ≡ \pi/2
(x+1)^2 ≡ x^2+2x+1
x^2 + 2x + 1 ≢ x^2+2x+2
x**2 ≡ x^2
x² ≡ x^2
2*x ≡ 2x
2 \times 3 ≡ 6
3x ≢ 3y
a+b ≡ b+a
a-b ≢ b-a
3+4i ≡ 4i+3
3+4i ≢ 3-4i
3 + 4i ≢ 3 + 4j
e^{2} ≡ e^2
\ln 2 ≢ \log 2
\log_2 8 ≡ 3
\infty ≡ infinity
∞ ≡ \infty
-\infty ≢ \infty
\frac{x}{2} ≡ 0.5x
\frac{1}{x+1} ≡ 1/(x+1)
\binom{5}{2} ≡ 10
|x| ≢ x
\lfloor x \rfloor ≢ x
(x-1)(x+1) ≡ x^2-1
x(x+2) ≡ x^2+2x
(x+1)(x+2) ≡ (x+2)(x+1)
2(x+1) ≢ 2x+1
\frac{x+1}{2} ≡ \frac{1}{2}x+\frac12
\sin^2 x + \cos^2 x ≡ 1
\tan x ≡ \frac{\sin x}{\cos x}
2^{x+1} ≡ 2 \cdot 2^x
\log_{10} 100 ≡ 2
\frac{1}{\sqrt{3}} ≡ \frac{\sqrt{3}}{3}
\sqrt{12} ≡ 2\sqrt{3}
\sqrt{12} ≢ 3\sqrt{2}
2 + \sqrt{3} ≢ 2 - \sqrt{3}
2 \pm \sqrt{3} ≡ 2+\sqrt{3}, 2-\sqrt{3}
1.41 ≢ \sqrt{2}
1.7320508 ≡ \sqrt{3}
3.1416 ≢ \pi
22/7 ≢ \pi
0.1 + 0.2 ≡ 0.3
10! ≡ 3628800
1+i ≢ 1-i
x ≢ X
n(n+1)/2 ≡ \frac{n(n+1)}{2}
n(n+1)/2 ≢ \frac{n(n-1)}{2}
"5" ≡ 5
x_1 ≢ x_2
a_1 ≢ 1
# Words and choices. MATH's \text{Evelyn}; AMC and NuminaMath's \textbf{(A)}\ 5 (MMLU and AQuA: A, (A), A.).
Paris ≡ paris.
\text{Paris} ≡ Paris
\textbf{Paris} ≡ Paris
Paris ≢ London
"Paris" ≡ Paris
\text{no solution} ≡ no solution
No solution ≡ no solution
no solutions ≡ no solution
no solution ≢ 0
No ≡ no
No ≢ Yes
true ≢ false
A ≡ A
(A) ≡ A
A ≡ (A)
\text{A} ≡ A
\text{(A)} ≡ A
\textbf{(A)} ≡ A
\mathrm{(A)} ≡ A
A. ≡ A
A) ≡ A
(a) ≡ (A)
a ≢ A
A ≢ B
(A) ≢ (B)
\textbf{(A)}\ 5 ≡ A
\textbf{(A) } 5 ≡ (A)
(A) 5 ≡ A
(A) 5 ≡ 5
(A) 5 ≢ B
(A) 5 ≢ (B) 5
A. Paris ≡ A
A: Paris ≡ A
A, B ≢ A
A and B ≢ A
AB ≢ A
A, C ≢ AC
A, C ≡ C, A
Option A ≡ A
\text{Monday} ≡ monday
\text{east} ≢ west
odd ≢ even
Evelyn ≡ \text{Evelyn}
New York ≡ new york
NewYork ≢ New York
x ≢ y
O(n) ≢ O(n^2)
O(n \log n) ≡ O(n\log n)
five ≡ 5
twenty-one ≡ 21
twenty one ≡ 21
twenty-one ≢ 22
\frac{\pi}{2} \text{ radians} ≡ \frac{\pi}{2}
Tuesday ≡ tuesday
"yes" ≡ Yes
Yes. ≡ Yes
\textit{heads} ≡ heads
heads ≢ tails
The Great Gatsby ≡ the great gatsby
Dr. Smith ≡ Dr Smith
Washington, D.C. ≡ Washington DC
blue and red ≢ blue
red, blue ≡ red, blue
José ≡ josé
北京 ≡ 北京
北京 ≢ 上海
café ≢ cafe
B ≢ D
(B) ≢ D
\boxed{B} ≡ B
B. 42 ≡ B
B. 42 ≡ 42
B. 42 ≢ C
\textbf{(C)}\ \frac{1}{2} ≡ C
\textbf{(C)}\ \frac{1}{2} ≡ 1/2
\textbf{(C)}\ \frac{1}{2} ≡ \textbf{(C)}
\textbf{(C)}\ \frac{1}{2} ≢ \textbf{(D)}
\text{C} ≢ \text{D}
Choice C ≡ C
Answer: C ≡ C
C and D ≢ C
A ≢ a
E ≢ e
# Of all kinds: forms of AIME, OlympiadBench, SciBench and MMLU answers.
A. A. A. ≢ B
not not 5 ≢ 5
\dfrac{3}{4} ≡ 0.75
3/4 ≡ \frac{3}{4}
0.75 ≡ 3/4
75\% ≡ 3/4
-0.75 ≢ 3/4
\frac{-3}{4} ≡ -0.75
-\dfrac34 ≡ -0.75
1.50 ≡ 1.5
1{,}500 ≡ 1500
1,500.00 ≡ 1500
$1,500 ≡ 1500
\$1{,}500 ≡ 1,500 dollars
1.5k ≢ 1500
15 minutes ≡ 15
15 min ≡ 15 minutes
15 minutes ≡ 0.25 hours
15 minutes ≢ 15 seconds
120 seconds ≡ 2 minutes
3 ft ≡ 36 in
3 ft ≡ 1 yard
1 mile ≡ 5280 feet
1 kg ≢ 1 lb
2 km ≢ 2 miles
2000 m ≡ 2 km
2000 m ≢ 2
2.5 L ≡ 2500 ml
10 cm^3 ≡ 10 mL
30 m/s ≢ 30 m
30 m/s ≢ 30 km/h
30 \frac{m}{s} ≡ 30 m/s
30 \text{ m/s} ≡ 30
30\ \mathrm{m\,s^{-1}} ≡ 30 m/s
\frac{3}{2}\pi ≡ 1.5\pi
5\pi\text{ cm}^2 ≡ 5\pi
25\pi ≢ 25
100 J ≡ 0.1 kJ
180^\circ ≢ \pi
60° ≢ \frac{\pi}{3}
60^\circ ≢ 60 radians
(2, 3) ≡ (2.0, 3.0)
(2; 3) ≡ (2, 3)
(2,3) ≢ [2,3]
(-\infty, 3) ≡ x < 3
(-\infty, 3] ≢ x < 3
x < 3 ≡ x \lt 3
3 > x ≡ x < 3
2 < x < 5 ≡ (2,5)
2 \le x < 5 ≡ [2,5)
2 \le x < 5 ≢ (2,5)
x \ne 2 ≡ x \neq 2
x \ne 2 ≢ x = 2
x \ne 2 ≢ 2
x \geq 5 ≡ \geq 5
at least 5 ≡ \geq 5
at least 5 ≡ x \ge 5
5 or more ≡ at least 5
no more than 5 ≡ at most 5
more than 5 ≢ at least 5
fewer than 5 ≡ less than 5
exactly 5 ≢ at least 5
1, 2, 3 ≡ 3, 2, 1
1, 2, 3 ≢ 1, 2, 3, 4
1 and 2 ≡ 1, 2
\{1, 2\} ≡ \{1, 2, 2\}
1, 2 and 3 ≡ 1, 2, 3
2,4 ≢ 24
24 ≢ 2,4
1;2 ≡ 1,2
x=1 \text{ or } x=2 ≡ 1, 2
x=1 or 2 ≡ 1,2
x = 1, 2 ≡ 1,2
\pm\sqrt{3} ≡ \sqrt{3}, -\sqrt{3}
\pm\sqrt{3} ≢ \sqrt{3}
1 \pm \sqrt{2} ≡ 1 - \sqrt{2}, 1+\sqrt{2}
\begin{bmatrix}1&2\\3&4\end{bmatrix} ≢ [[1,2],[3,4]]
yes ≢ no
Yes ≡ YES
True ≡ true
True ≢ False
\text{True} ≡ True
true ≢ yes
even ≢ odd
red ≡ Red
The red ball ≢ red ball
Newton's method ≡ Newton’s method
Saint-Denis ≡ Saint Denis
X ≢ x
(x) ≡ x
B ≡ (B)
\mathbf{B} ≡ B
[B] ≡ B
$B$ ≡ B
\text{(B) } 12 ≡ B
B) 12 ≡ B
(B) ≢ (C)
b) ≡ B
B, C ≢ BC
D. All of the above ≡ D
D. All of the above ≡ All of the above
D. All of the above ≢ None of the above
0xFF ≡ 255
0b11 ≡ 3
11_{10} ≡ 11
1010_2 ≡ 10
1010_2 ≢ 11
A5_{16} ≡ 165
777_8 ≡ 777_{8}
2^3 ≡ 8
2^3 ≢ 3^2
8^{1/3} ≡ 2
10^6 ≡ 1,000,000
10^6 ≡ 1 million
1e6 ≡ 10^6
3.0 \times 10^8 ≡ 300000000
3.0e8 ≡ 3 \times 10^8
3.0 \times 10^8 ≢ 3.0 \times 10^9
1.6 \times 10^{-19} ≡ 1.6e-19
1.6\times10^{-19}\text{ C} ≡ 1.6e-19
9.81 ≢ 9.8
2.718 ≢ e
\ln(e^2) ≡ 2
n^2 + n ≡ n(n+1)
n^2 + n ≢ n^2 - n
x + y ≡ y + x
2xy ≡ 2yx
a/b ≡ \frac{a}{b}
a/b ≢ b/a
\frac{a+b}{c} ≢ a+b/c
x^{2} ≡ x^2
x_{1} ≡ x_1
f(x) = x^2 ≡ x^2
f(x) = x^2 ≢ f(x) = x^3
y = x^2 ≡ x^2
y - 1 = 2(x-3) ≡ y = 2x - 5
2x + 3y = 6 ≡ 3y + 2x = 6
2x + 3y = 6 ≡ 4x + 6y = 12
2x+3y=6 ≢ 2x+3y=7
-x ≢ x
\sqrt{x^2} ≢ x
\text{undefined} ≡ undefined
DNE ≡ dne
\infty ≢ -\infty
+\infty ≡ \infty
5 \times 4 = 20 ≡ 20
4 \times 5 ≡ 20
20 = 4 \times 5 ≡ 20
12:00 ≡ 12:00 PM
3:30 PM ≡ 3:30 p.m.
3:30 PM ≢ 3:30 AM
3:30 ≢ 3:35
3:30 ≢ 3.5
2024-01-05 ≡ 2024-01-05
January 5 ≢ 5 January
July 4, 1776 ≡ July 4, 1776
July 4 ≢ July 5
1776 AD ≡ 1776
21st ≡ 21
2nd ≢ 3rd
third ≢ 3rd
\frac{1}{3} ≢ 0.33
one ≡ 1
Ten ≡ 10
zero ≡ 0
twelve dollars ≡ $12
minus three ≡ -3
negative \frac{1}{2} ≡ -1/2
- \frac{1}{2} ≡ -0.5
(−1, 2) ≡ (-1, 2)
π/4 ≡ \frac{\pi}{4}
3√2 ≡ 3\sqrt{2}
x ≥ 2 ≡ x \geq 2
5 × 10³ ≡ 5000
x³ ≡ x^3
∅ ≡ \emptyset
# Names, dates and ranges, which algebra would work out: other orders of the same letters and digits are other answers.
H2O ≡ H2O
H_2O ≡ H2O
\text{CO}_2 ≡ CO2
H2O ≢ HO2
CO2 ≢ C2O
R2D2 ≢ D2R2
B12 ≢ B21
A1 ≢ 1A
x_1x_2 ≡ x_2x_1
2 \sqrt2 ≡ 2\sqrt{2}
3e8 m/s ≡ 3e8
2023-01-05 ≡ 2023-1-5
2023-01-05 ≢ 2023-05-01
2023-01-05 ≢ 2017
2017 ≢ 2023-01-05
01/05/2023 ≡ 1/5/2023
1.2.3 ≢ 1.2.4
1.2.10 ≢ 1.2.1
3–5 ≡ 3-5
3-5 ≢ 4-6
-2 ≢ 3-5
10-3 ≡ 7
snake\_case ≡ snake_case
# A point, and the values of its coordinates.
x = 2, y = 3 ≡ (2, 3)
y = 3, x = 2 ≡ (2, 3)
(2, 3) ≡ x = 2, y = 3
x = 3, y = 2 ≢ (2, 3)
(2, 3) ≢ x = 3, y = 2
x = 2, x = 3 ≡ 2, 3
# Functions without a backslash.
sin(x) ≡ \sin x
\sin(x) ≡ sin(x)
cos(pi/3) ≡ 1/2
ln(2) ≡ \ln 2
ln 2 ≢ \ln 3
exp(x) ≡ e^x
log_2(8) ≡ 3
O(n log n) ≡ O(n \log n)
arctan(1) ≡ \frac{\pi}{4}
5 log ≢ 5 sin
all real numbers ≡ (-\infty, \infty)
all real numbers ≡ \mathbb{R}
"""
ROWS = [line for line in TABLE.splitlines() if line and not line.startswith("# ")]


@pytest.mark.parametrize("row", ROWS)
def test_a_right_answer_in_another_form_is_right_and_another_answer_is_wrong(row: str) -> None:
    is_same = " ≡ " in row
    answer, expected = row.split(" ≡ " if is_same else " ≢ ")
    assert same_answer(answer, expected) is is_same
    assert math_boxed_or_last(rf"So it is $\boxed{{{answer}}}$.", Task("simple", {"answer": expected})) == is_same


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ("0.5", r"\frac{1}{2}", True),
        (r"\dfrac{2}{4}", "1/2", True),
        (r"-\frac{1}{3}", "-1/3", True),
        ("0.333", "1/3", False),
        ("1,234", "1234", True),
        (r"1{,}234", "1234", True),
        ("5.0", "5", True),
        ("5.", "5", True),
        ("$5$", "5", True),
        (r"50\%", "50", True),
        (r"50\%", "0.5", True),
        ("0.125", r"$12.5\%$", True),
        (r"12\%", r"0.12\%", False),
        (r"5\%", "0.5", False),
        (r"90^\circ", "90", True),
        ("1.2e5", r"1.2 \times 10^5", True),
        ("120000", r"$1.2 \cdot 10^{5}$", True),
        ("1.3e5", r"1.2 \times 10^5", False),
        ("-0.0012", "-1.2 × 10^-3", True),
        (r"x \times 10^5", r"y \times 10^5", False),
        ("€5", "5", True),
        ("5 dollars", "5", True),
        ("5", "5 EUR", True),
        (r"\$5", "5 dollars", True),
        ("$5", "5 USD", True),
        (r"$\$5$", r"5\text{ dollars}", True),
        ("5 euros", "€5.00", True),
        (r"\pounds 5", "£5", True),
        ("$5$", "5 euros", True),
        ("€5", "$5$", True),
        ("$$5$$", "5 euros", True),
        ("$5", "6 dollars", False),
        (r"\$5", "€5", False),
        (r"$\$5$", "5 euros", False),
        ("€5", "$5", False),
        ("5 dollars", "5 euros", False),
        ("€6", "5", False),
        ("", "EUR", False),
        ("dollars", "euros", False),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        (r"\text{blue}", "blue", True),
        (r"x + 1", "x+1", True),
        ("x+1", "x+2", False),
        (r"1\frac{1}{2}", "11/2", False),
        ("1/0", "1/0", True),
        ("1/0", "2/0", False),
        ("", "0", False),
        ("1+x", "x+1", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        (r"\{2, 1\}", r"\{1, 2\}", True),
        (r"(5, \infty)", r"[5, \infty)", False),
        ("x = 5", "5", True),
        ("(B)", "B", True),
        ("12 cm", "12", True),
        ("lube", "blue", False),
        ("on", "no", False),
        ("Jerry and Tom", "Tom and Jerry", False),
        (r"\frac{1}{2}x", r"\frac{1}{2x}", False),
        (r"x+\frac{1}{2}", r"\frac{x+1}{2}", False),
        (r"1+\frac{2}{3}", r"\frac{1+2}{3}", False),
        (r"\frac{3}{4\pi}", r"\frac{3}{4}\pi", False),
        (r"\frac{1}{2}3", "1/23", False),
        ("1 1/2", "3/2", True),
        ("1 1/2", "11/2", False),
        (r"-1\tfrac{1}{2}", "-1.5", True),
        (r"1\frac{1}{2}", "3/2", True),
        ("2 3", "23", False),
        (r"\sqrt{2} 3", r"\sqrt{23}", False),
        ("1, 200", "1200", False),
        ("(1,234)", "(1234)", False),
        ("0.00000003", r"2 \times 10^{-8}", False),
        ("0.00000002", r"2 \times 10^{-8}", True),
        ("1.414214", r"\sqrt{2}", True),
        ("1.42", r"\sqrt{2}", False),
        ("2.5e3", "2500", True),
        ("1e-05", "0.00001", True),
        ("−12", "-12", True),
        ("**4**", "4", True),
        (r"\$5.00", "5", True),
        (r"\begin{pmatrix} 2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 3 \\ 2 \end{pmatrix}", False),
        (r"\begin{pmatrix} 3 \\ -1 \end{pmatrix}", r"\begin{pmatrix} 2 \end{pmatrix}", False),
        (r"\begin{pmatrix} 3 \\ -1 \end{pmatrix}", r"\begin{pmatrix}3\\-1\end{pmatrix}", True),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", True),
        (r"2,\!500", "2500", True),
        (r"11{,}111\,100", "11111100", True),
        (r"18\text{ dollars}", "18", True),
        (r"18\text{ cm}^2", "18", True),
        ("**1/2**.", "0.5", True),
        ("`x+1`", "1+x", True),
        ("Yes", "yes", True),
        ("true", "True", True),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "1", False),
    ],
)
def test_same_answer(answer: str, expected: str, same: bool) -> None:
    assert same_answer(answer, expected) is same
